"""Keeps the models of a server: which there are, which are loaded, and which must make room."""
