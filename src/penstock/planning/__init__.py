"""Measures and forecasts memory, speed and quality of models, apart from serving them."""
