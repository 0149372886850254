"""Serves the routes of SGLang."""
