"""The CUDA backend on a bare machine: torch, Triton, one GPU, and random weights of the shape of Llama-3.1-8B, or over
HTTP of another model's.

    PYTHONPATH=src python bench/cuda.py --cells step,profile,decode1,prefill,batch64,batch256 --json cuda.json
    PYTHONPATH=src python bench/cuda.py --cells start,http64,http256 --weights fp8
    PYTHONPATH=src python bench/cuda.py --cells long,shared,host_tier,saturated
    PYTHONPATH=src python bench/cuda.py --cells http1,http64,http256 --shape qwen3_next

Every cell reports its figures, or its traceback, in one JSON file and as lines on the way:

- `long`: over HTTP, 16 clients with 16,000 tokens each, and 64 with 4,096 in common
- `shared`: decode steps of rows with a prefix in common
- `host_tier`: a prompt that comes back from host memory, and tokens a second while blocks leave for it
- `saturated`: over HTTP, 1,024 clients (128/128), 512 (1,000/1,000) and 256 (2,048/2,048)
- `library_attention`: prefill attention beside FlashAttention-3's, FlashInfer's and torch's
- `delta`: the delta rule over prompts of 2,048 and 16,384 tokens, token by token and in chunks
- `mla`: MLA of DeepSeek-V2-Lite's shape, prompts absorbed and expanded, and decode steps beside memory speed
- `kv8_prefill`: prompts over a KV cache of 8 bits, as it is and as a copy in 16 that Hopper's kernel reads
- `deterministic`: what `--deterministic` costs, and whether its bits are equal
- `tune`: the fastest tilings, which backend/cuda/tilings.py then names

The cells over HTTP also need what `penstock serve` does: msgspec, pyzmq, starlette, anyio, uvicorn, httptools, uvloop,
tokenizers, jinja2, prometheus-client, python-multipart, rich and what these need. vLLM can serve the same folders.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent / "gpu")  # torch imports a package called cuda and must not find this file
    from cells import main

    main(__doc__ or "")
