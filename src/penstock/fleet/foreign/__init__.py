"""Serves models of other engines (vLLM, SGLang, llama.cpp, Ollama, any OpenAI server) behind the gateway's URL."""
