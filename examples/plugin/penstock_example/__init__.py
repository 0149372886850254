"""Adds a dialect, a model family and a tool format to Penstock."""
