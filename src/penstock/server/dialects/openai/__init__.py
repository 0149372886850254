"""Implements OpenAI's chat, completions, embeddings, files and batches."""
