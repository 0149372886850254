"""Implements Ollama's API."""
