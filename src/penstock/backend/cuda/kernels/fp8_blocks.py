"""GEMM with FP8 (e4m3) matrices whose values share a scale in every 128 columns of a row.

Checkpoints with scales for blocks of 128 x 128 are packed so: the scale is repeated for 128 rows, which takes 3 % more
memory and lets any rows lie below each other. Sums over 128 columns are scaled in float32. Up to 16 rows are multiplied
in bfloat16 as they are; more are quantized first, each with a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.fp8 import Fp8Weight
from penstock.backend.cuda.kernels.fp8_gemm import load_fp8_tiles, matrix_of
from penstock.backend.cuda.kernels.gemm_config import Epilogue, GemmConfig
from penstock.backend.cuda.kernels.interpreter import dot
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.split_k import SplitKScratch, joined, store_tile

COLUMNS = 128  # per scale


@dataclass(frozen=True, slots=True)
class Fp8BlockWeight(Fp8Weight):
    """An FP8 weight with scales [width / 128, rows]."""

    @property
    def bytes(self) -> int:
        return self.rows * self.width + 4 * int(self.scales.numel())


class Tiling(NamedTuple):
    """Says how a product is tiled: each program takes `rows` rows of the matrix and `items` rows of x."""

    rows: int  # per program
    items: int  # rows of x
    split: int  # programs that share the columns
    warps: int
    stages: int


@triton.jit(do_not_specialize=["count"])
def _fp8_block_gemm(
    x,
    item_scales,
    matrix,
    bias,
    out,
    scratch,
    count,
    strides,
    CONFIG: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    TILING: tl.constexpr = CONFIG.tiling
    K: tl.constexpr = CONFIG.columns
    M: tl.constexpr = TILING.rows
    N: tl.constexpr = TILING.items
    rows, width = matrix.rows, matrix.width
    line = tl.program_id(0) * M + tl.arange(0, M)
    item = tl.program_id(1) * N + tl.arange(0, N)
    split = tl.program_id(2)
    column = tl.arange(0, K)
    share = tl.cdiv(tl.cdiv(width, K), TILING.split)
    total = tl.zeros([M, N], tl.float32)
    row = tl.minimum(line, rows - 1)
    at = matrix.data + row.to(tl.int64)[:, None] * width + column[None, :]
    items_at = x + tl.minimum(item, count - 1).to(tl.int64)[None, :] * strides[0] + column[:, None]
    wait_for_previous(PDL)
    for step in tl.range(split * share, tl.minimum((split + 1) * share, tl.cdiv(width, K))):
        weights, items = load_fp8_tiles(at, items_at, step * K, column, width)
        scale = tl.load(matrix.scales + step * rows + row)
        product = dot(weights if FP8 else weights.to(tl.bfloat16), items)
        total += product * scale[:, None]

    line = line[:, None]
    item = item[None, :].to(tl.int64)
    wanted = (line < rows) & (item < count)
    last, total = joined(total, line, item, wanted, rows, count, scratch, TILING.split)
    if last:
        if FP8:
            total *= tl.load(item_scales + item, item < count, 0.0)
        store_tile(total, line, item, wanted, rows, bias, out, strides[1], CONFIG.epilogue.bias)


def fp8_block_gemm(
    x: Any,
    item_scales: Any | None,
    weight: Fp8BlockWeight,
    bias: Any | None,
    out: Any,
    tiling: Tiling,
    scratch: SplitKScratch,
) -> None:
    """Computes out [T, rows] = x [T, width] @ weight.T (+ bias); x is bfloat16, or FP8 where it has scales [T]."""
    grid = (triton.cdiv(weight.rows, tiling.rows), triton.cdiv(len(x), tiling.items), tiling.split)
    config = GemmConfig(tiling, Epilogue(bias=bias is not None), columns=COLUMNS)
    vectors = weight.scales if item_scales is None else item_scales, weight.scales if bias is None else bias
    options = launch_options(tiling.warps, tiling.stages)
    _fp8_block_gemm[grid](
        x,
        vectors[0],
        matrix_of(weight),
        vectors[1],
        out,
        scratch,
        len(x),
        (x.stride(0), out.stride(0)),
        CONFIG=config,
        FP8=item_scales is not None,
        **options,
    )


@triton.jit
def _gather_fp8_blocks(tokens, values, scales, out, rows, width, K: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    item = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    column = step * K + tl.arange(0, K)
    wait_for_previous(PDL)
    row = tl.load(tokens + item).to(tl.int64)
    scale = tl.load(scales + step * rows + row)
    line = tl.load(values + row * width + column, column < width, 0.0).to(tl.float32) * scale
    tl.store(out + item * width + column, line.to(out.dtype.element_ty), column < width)


def gather_fp8_blocks(weight: Fp8BlockWeight, tokens: Any, out: Any) -> None:
    grid = (len(tokens), len(weight.scales))
    _gather_fp8_blocks[grid](
        tokens, weight.values, weight.scales, out, weight.rows, weight.width, K=COLUMNS, **launch_options()
    )
