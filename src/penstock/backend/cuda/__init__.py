"""The CUDA backend: torch and Triton, for NVIDIA GPUs. Needs the extra `penstock[cuda]`."""

from __future__ import annotations

from penstock.backend.cuda.backend import CudaBackend, finds_gpu

__all__ = ["CudaBackend", "finds_gpu"]
