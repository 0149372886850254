#!/usr/bin/env bash
# Asks a server in the dialects of OpenAI, Anthropic, Ollama and llama.cpp: bash examples/curl.sh [URL]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
post() { curl --silent --show-error --fail-with-body "$url$1" -H 'content-type: application/json' -d "$2" && echo; }

post /v1/chat/completions '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}'
post /v1/messages '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}'
post /api/generate '{"model": "smollm2", "prompt": "Hello", "stream": false, "options": {"num_predict": 20}}'
post /completion '{"prompt": "Once upon a time", "n_predict": 20}'
