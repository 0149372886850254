"""Multiplies some tens of rows of FP8 with a matrix of FP8, on the tensor cores.

cuBLAS is slow for few rows when every row has a scale. Columns are split over programs as in split_k.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.fp8 import Fp8Weight
from penstock.backend.cuda.kernels.gemm_config import Epilogue, GemmConfig
from penstock.backend.cuda.kernels.interpreter import INTERPRETED
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.quant_gemm import Tiling
from penstock.backend.cuda.kernels.split_k import SplitKScratch, joined, store_tile


class Fp8Operand(NamedTuple):
    """Holds a matrix of FP8 as kernels take it."""

    data: Any  # [rows, width]
    scales: Any
    rows: int
    width: int


def matrix_of(weight: Fp8Weight) -> Fp8Operand:
    return Fp8Operand(weight.values, weight.scales, weight.rows, weight.width)


@triton.jit
def load_fp8_tiles(data_at, items_at, first, column, width):
    """Returns the tiles of the matrix and of the rows that begin at column `first`; zeros stand beyond `width`."""
    inside = first + column < width
    return tl.load(data_at + first, inside[None, :], 0.0), tl.load(items_at + first, inside[:, None], 0.0)


@triton.jit(do_not_specialize=["count"])
def _fp8_gemm(x, item_scales, matrix, bias, out, scratch, count, out_stride, CONFIG: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    TILING: tl.constexpr = CONFIG.tiling
    M: tl.constexpr = 16 * TILING.tiles
    N: tl.constexpr = TILING.rows
    K: tl.constexpr = 64 * TILING.steps
    rows, width = matrix.rows, matrix.width
    line = tl.program_id(0) * M + tl.arange(0, M)
    item = tl.program_id(1) * N + tl.arange(0, N)
    split = tl.program_id(2)
    column = tl.arange(0, K)
    share = tl.cdiv(tl.cdiv(width, K), TILING.split) * K
    total = tl.zeros([M, N], tl.float32)
    at = matrix.data + tl.minimum(line, rows - 1).to(tl.int64)[:, None] * width + column[None, :]
    items_at = x + tl.minimum(item, count - 1)[None, :] * width + column[:, None]
    wait_for_previous(PDL)
    for first in tl.range(split * share, tl.minimum((split + 1) * share, width), K):
        weights, items = load_fp8_tiles(at, items_at, first, column, width)
        if INTERPRETED:
            total = tl.dot(weights.to(tl.float32), items.to(tl.float32), total)
        else:
            total = tl.dot(weights, items, total, max_num_imprecise_acc=128 if K >= 128 else K)

    line = line[:, None]
    item = item[None, :].to(tl.int64)
    wanted = (line < rows) & (item < count)
    last, total = joined(total, line, item, wanted, rows, count, scratch, TILING.split)
    if last:
        total *= tl.load(matrix.scales + line, line < rows, 0.0) * tl.load(item_scales + item, item < count, 0.0)
        store_tile(total, line, item, wanted, rows, bias, out, out_stride, CONFIG.epilogue.bias)


def fp8_gemm(
    x: Any, item_scales: Any, weight: Fp8Weight, bias: Any | None, out: Any, tiling: Tiling, scratch: SplitKScratch
) -> None:
    """Computes out [T, rows] = (x [T, width] * item_scales [T]) @ weight.T (+ bias), where x is FP8."""
    grid = (triton.cdiv(weight.rows, 16 * tiling.tiles), triton.cdiv(len(x), tiling.rows), tiling.split)
    matrix, vector = matrix_of(weight), weight.scales if bias is None else bias
    config = GemmConfig(tiling, Epilogue(bias=bias is not None))
    options = launch_options(tiling.warps, tiling.stages)
    _fp8_gemm[grid](x, item_scales, matrix, vector, out, scratch, len(x), out.stride(0), CONFIG=config, **options)
