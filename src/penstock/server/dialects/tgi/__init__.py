"""Serves the routes of Text Generation Inference."""
