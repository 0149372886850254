"""Keeps streams whose clients may lose their connection and come back."""
