"""A GPU that cannot be used, and why."""

from __future__ import annotations

import logging
import runpy
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger(__name__)


def cuda_trouble() -> str:
    """Why torch cannot use the GPU that is there; told, because then the CPU computes."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    trouble = ""
    if runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda") is None:
        trouble = "this torch was built without CUDA"  # known without importing it, which takes seconds
    else:
        from penstock.backend.cuda import finds_gpu

        if not finds_gpu():
            trouble = "torch finds none it can use: `nvidia-smi` may say why"
    if trouble:
        log.warning("there is an NVIDIA GPU, but %s; the CPU computes (--device cuda makes this an error)", trouble)
    return trouble
