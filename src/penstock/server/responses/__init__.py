"""Implements OpenAI's responses."""
