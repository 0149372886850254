"""Decides who may use the server, and how much of it."""
