"""Serves the routes that clients of vLLM use beside OpenAI's."""
