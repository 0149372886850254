"""The CUDA backend on a bare machine: torch, Triton, one GPU, a model of the shape of Llama-3.1-8B with random weights.

    PYTHONPATH=src python bench/cuda.py --cells step,profile,decode1,prefill,batch64,batch256 --json cuda.json
    PYTHONPATH=src python bench/cuda.py --cells start,http64,http256 --weights fp8
    PYTHONPATH=src python bench/cuda.py --cells long,shared,host_tier,saturated,deterministic

Every cell reports its figures, or its traceback, in one JSON file and as lines on the way. `long` has 16 clients with
16,000 tokens each and 64 with 4,096 in common over HTTP, `shared` decode steps of such rows, `host_tier` a prompt that
comes back from host memory, `saturated` 512 and 1,024 clients, `deterministic` what --deterministic costs and whether
logits then are the same in every batch. `tune` looks for the fastest tilings, which backend/cuda/tilings.py then names.
The cells over HTTP also need what `penstock serve` does: msgspec, pyzmq, starlette, anyio, uvicorn, httptools, uvloop,
tokenizers, jinja2, prometheus-client, python-multipart, rich and what these need.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent / "gpu")  # torch imports a package called cuda and must not find this file
    from cells import main

    main(__doc__ or "")
