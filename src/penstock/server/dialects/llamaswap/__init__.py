"""Serves the routes by which clients of llama-swap see and unload models."""
