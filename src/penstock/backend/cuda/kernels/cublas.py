"""Calls cuBLAS for GEMMs of plain values."""

from __future__ import annotations

from typing import Any

import torch


def cublas_gemm(x: Any, weight: Any, bias: Any | None, out: Any) -> None:
    """Computes out [T, rows] = x [T, width] @ weight [rows, width].T (+ bias)."""
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    elif x.is_cuda:
        torch.ops.aten.mm.dtype_out(x, weight.t(), out.dtype, out=out)
    else:
        out.copy_(x.to(out.dtype) @ weight.t().to(out.dtype))
    if bias is not None:
        out += bias
