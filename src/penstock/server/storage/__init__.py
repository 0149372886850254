"""Stores answers that clients may retrieve later."""
