"""Reads and writes GGUF files, and translates between their metadata and a model's spec."""
