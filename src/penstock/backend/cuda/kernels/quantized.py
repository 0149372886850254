"""Which kernel multiplies rows with a quantized matrix, and how: found on an H200 (bench/cuda_products.py)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from penstock.backend.cuda.kernels import few, many
from penstock.backend.cuda.kernels.expand import expand
from penstock.backend.cuda.kernels.skinny import Scratch
from penstock.backend.cuda.quantize import QuantizedWeight

PROGRAMS = 264  # two for each multiprocessor
FEW = 16
MANY = 512  # rows up to which values need not be written out


@lru_cache(maxsize=4096)
def few_tiling(count: int, rows: int, width: int, gated: bool) -> few.Tiling:
    warps = 8 if rows < 16 * PROGRAMS * 2 else 4
    return few.Tiling(warps, 2, 2 if gated or rows >= 32 * PROGRAMS else 1)


@lru_cache(maxsize=4096)
def many_tiling(count: int, rows: int, width: int) -> many.Tiling:
    block = 32 if count <= 32 else 64 if count <= 64 else 128
    tiles = 4 if rows < 128 * PROGRAMS // 2 else 8
    programs = -(-rows // (16 * tiles)) * -(-count // block)
    split = max(min(PROGRAMS // programs, 8, width // 512), 1)
    return many.Tiling(tiles, block, 1, 1 << (split.bit_length() - 1), 4, 3)


def product(
    x: Any, weight: QuantizedWeight, bias: Any | None, out: Any, scratch: Scratch, workspace: Any | None = None
) -> None:
    """out [T, rows] = x [T, width] @ weight.T (+ bias). `workspace` takes the values of a matrix in bfloat16, for the
    library's product of many rows."""
    count = len(x)
    if count <= FEW:
        few.few(x, weight, bias, out, tiling=few_tiling(count, weight.rows, weight.width, False))
    elif count <= MANY or workspace is None:
        many.many(x, weight, bias, out, many_tiling(count, weight.rows, weight.width), scratch)
    else:
        values = workspace[: weight.rows * weight.width].view(weight.rows, weight.width)
        expand(weight, values)
        torch.mm(x, values.t(), out=out)
        if bias is not None:
            out += bias
