"""Computes on NVIDIA GPUs with torch and Triton; needs the extra `penstock[cuda]`.

The names below are imported when they are first used: a device's properties and its tuned tilings need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.backend.cuda.backend import CudaBackend
    from penstock.backend.cuda.devices import gpu_count

__all__ = ["CudaBackend", "gpu_count"]
HOMES = {"CudaBackend": "backend", "gpu_count": "devices"}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
