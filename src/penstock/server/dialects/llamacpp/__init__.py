"""Serves the routes of llama.cpp's server."""
