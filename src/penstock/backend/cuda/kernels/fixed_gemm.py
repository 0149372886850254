"""GEMM of plain values in tiles of one size for any number of rows: a row's sums are the same in every step.

Columns are split over programs as in split_k.py, only by the shape of the matrix. Where each head has a matrix of
its own, they are not split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.gemm_config import Epilogue, GemmConfig
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.split_k import SplitKScratch, joined, store_tile


class Tiling(NamedTuple):
    """Says how a product is tiled: each program takes `rows` rows of the matrix and `items` rows of x."""

    rows: int  # per program
    items: int  # rows of x
    width: int  # columns at a time
    split: int  # programs that share the columns
    warps: int
    stages: int


@triton.jit
def sum_columns(at, items_at, begin, end, width, TILING: tl.constexpr):
    """Returns the products of rows of a matrix with rows of x from column `begin` to `end`: both begin at these
    addresses."""
    M: tl.constexpr = TILING.rows
    N: tl.constexpr = TILING.items
    column = tl.arange(0, TILING.width)
    total = tl.zeros([M, N], tl.float32)
    for first in tl.range(begin, end, TILING.width):
        inside = first + column < width
        lines = tl.load(at + first, inside[None, :], 0.0)
        items = tl.load(items_at + first, inside[:, None], 0.0)
        total = tl.dot(lines, items, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["count"])
def _fixed_gemm(x, weight, bias, out, scratch, count, rows, width, strides, CONFIG: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    TILING: tl.constexpr = CONFIG.tiling
    M: tl.constexpr = TILING.rows
    N: tl.constexpr = TILING.items
    K: tl.constexpr = TILING.width
    line = tl.program_id(0) * M + tl.arange(0, M)
    item = tl.program_id(1) * N + tl.arange(0, N)
    split = tl.program_id(2)
    column = tl.arange(0, K)
    share = tl.cdiv(tl.cdiv(width, K), TILING.split) * K
    at = weight + tl.minimum(line, rows - 1).to(tl.int64)[:, None] * width + column[None, :]
    items_at = x + tl.minimum(item, count - 1).to(tl.int64)[None, :] * strides[0] + column[:, None]
    wait_for_previous(PDL)
    total = sum_columns(at, items_at, split * share, tl.minimum((split + 1) * share, width), width, TILING)
    line = line[:, None]
    item = item[None, :].to(tl.int64)
    wanted = (line < rows) & (item < count)
    last, total = joined(total, line, item, wanted, rows, count, scratch, TILING.split)
    if last:
        store_tile(total, line, item, wanted, rows, bias, out, strides[1], CONFIG.epilogue.bias)


@triton.jit(do_not_specialize=["count"])
def _fixed_heads_gemm(x, weight, out, count, rows, width, strides, TILING: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    line = tl.program_id(0) * TILING.rows + tl.arange(0, TILING.rows)
    item = (tl.program_id(1) * TILING.items + tl.arange(0, TILING.items)).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, TILING.width)
    at = weight + (head * rows + tl.minimum(line, rows - 1))[:, None] * width + column[None, :]
    items_at = x + head * strides[1] + tl.minimum(item, count - 1)[None, :] * strides[0] + column[:, None]
    wait_for_previous(PDL)
    total = sum_columns(at, items_at, 0, width, width, TILING)
    place = out + head * strides[3] + item[None, :] * strides[2] + line[:, None]
    tl.store(place, total.to(out.dtype.element_ty), (line < rows)[:, None] & (item < count)[None, :])


def fixed_gemm(x: Any, weight: Any, bias: Any | None, out: Any, tiling: Tiling, scratch: SplitKScratch) -> None:
    """Computes out [count, rows] = x [count, width] @ weight [rows, width].T (+ bias)."""
    (count, width), rows = x.shape, len(weight)
    config = GemmConfig(tiling, Epilogue(bias=bias is not None))
    grid = (triton.cdiv(rows, tiling.rows), triton.cdiv(count, tiling.items), tiling.split)
    vector, strides = weight if bias is None else bias, (x.stride(0), out.stride(0))
    _fixed_gemm[grid](
        x,
        weight,
        vector,
        out,
        scratch,
        count,
        rows,
        width,
        strides,
        CONFIG=config,
        **launch_options(tiling.warps, tiling.stages),
    )


def fixed_heads_gemm(x: Any, weight: Any, out: Any, tiling: Tiling) -> None:
    """Multiplies each head by a matrix of its own: out [count, heads, rows] = x [count, heads, width] with weight
    [heads, rows, width]. Columns are not split."""
    (count, heads, width), rows = x.shape, weight.shape[1]
    grid = (triton.cdiv(rows, tiling.rows), triton.cdiv(count, tiling.items), heads)
    strides = *x.stride()[:2], *out.stride()[:2]
    options = launch_options(tiling.warps, tiling.stages)
    _fixed_heads_gemm[grid](x, weight, out, count, rows, width, strides, TILING=tiling, **options)
