"""Scores pairs of texts and classifies texts, in the shapes of vLLM, Jina, Cohere, llama.cpp and TEI."""
