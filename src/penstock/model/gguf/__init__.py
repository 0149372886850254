"""GGUF files: reading them, what their metadata means, and writing them."""
