"""Answers questions about the server itself."""
