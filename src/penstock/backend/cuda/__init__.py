"""Computes on NVIDIA GPUs with torch and Triton; needs the extra `penstock[cuda]`."""

from __future__ import annotations

from penstock.backend.cuda.backend import CudaBackend
from penstock.backend.cuda.devices import gpu_count

__all__ = ["CudaBackend", "gpu_count"]
