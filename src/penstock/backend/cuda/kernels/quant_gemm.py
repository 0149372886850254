"""Multiplies some tens or hundreds of rows with a quantized matrix, on the tensor cores.

A program makes values of 16 * R rows of the matrix in registers and multiplies them with the rows of a block. Columns
are split over several programs (split_k.py) if the matrix does not fill the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.gemm_config import Epilogue, GemmConfig
from penstock.backend.cuda.kernels.interpreter import dot_bfloat16
from penstock.backend.cuda.kernels.mma_fragments import axis, format_of, load_tiles, matrix_of, values_of
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.split_k import SplitKScratch, joined, store_tile
from penstock.backend.cuda.pack_quantized import QuantizedWeight


class Tiling(NamedTuple):
    """Says how a product is tiled: each program takes `tiles` times 16 rows of the matrix and `rows` rows of x."""

    tiles: int  # 16 rows each, per program
    rows: int  # rows of x per program
    steps: int  # tiles of 64 columns at a time
    split: int  # programs that share the columns
    warps: int
    stages: int


@triton.jit(do_not_specialize=["count"])
def _quant_gemm(x, matrix, bias, out, scratch, count, x_stride, out_stride, CONFIG: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    TILING: tl.constexpr = CONFIG.tiling
    R: tl.constexpr = TILING.tiles
    T: tl.constexpr = TILING.steps
    N: tl.constexpr = TILING.rows
    FORMAT: tl.constexpr = CONFIG.format
    rows, tiles = matrix.rows, matrix.tiles
    item = tl.program_id(1) * N + tl.arange(0, N)
    split = tl.program_id(2)
    row = tl.minimum(tl.program_id(0) * R + axis(R, 2), tl.cdiv(rows, 16) - 1)
    column = tl.arange(0, 64 * T)
    share = tl.cdiv(tl.cdiv(tiles, T), TILING.split) * T
    total = tl.zeros([16 * R, N], tl.float32)
    wait_for_previous(PDL)
    for first in tl.range(split * share, tl.minimum((split + 1) * share, tiles), T, num_stages=TILING.stages):
        loaded = load_tiles(matrix, row, first, R, T, 0, CONFIG.even, FORMAT)
        inside = (item < count)[:, None]
        if not CONFIG.even:
            inside = inside & (first * 64 + column < matrix.width)[None, :]
        items = tl.load(x + first * 64 + item[:, None] * x_stride + column[None, :], inside, 0.0)
        total = dot_bfloat16(values_of(loaded, matrix.base, R, T, FORMAT), tl.trans(items), total)

    line = tl.program_id(0) * (16 * R) + tl.arange(0, 16 * R)[:, None]
    item = item[None, :].to(tl.int64)
    wanted = (line < rows) & (item < count)
    last, total = joined(total, line, item, wanted, rows, count, scratch, TILING.split)
    if last:
        store_tile(total * matrix.factor, line, item, wanted, rows, bias, out, out_stride, CONFIG.epilogue.bias)


def quant_gemm(
    x: Any, weight: QuantizedWeight, bias: Any | None, out: Any, tiling: Tiling, scratch: SplitKScratch
) -> None:
    """Computes out [T, rows] = x [T, width] @ weight.T (+ bias), of bfloat16."""
    grid = (triton.cdiv(weight.rows, 16 * tiling.tiles), triton.cdiv(len(x), tiling.rows), tiling.split)
    even = weight.width % (64 * tiling.steps) == 0
    config = GemmConfig(tiling, Epilogue(bias=bias is not None), even, format_of(weight))
    matrix, vector = matrix_of(weight), weight.scales if bias is None else bias
    # A step of 64 rows takes 6.7 ms so, 7.5 with early starts.
    options = launch_options(tiling.warps, tiling.stages, early=False)
    _quant_gemm[grid](x, matrix, vector, out, scratch, len(x), x.stride(0), out.stride(0), CONFIG=config, **options)
