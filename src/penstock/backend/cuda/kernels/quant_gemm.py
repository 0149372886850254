"""Product of some tens or hundreds of rows with a quantized matrix, on the tensor cores.

A program makes values of 16 * R rows of the matrix in registers and multiplies them with the rows of a block. Columns
are split over several programs where the matrix alone does not fill the device; the last of them to finish adds up what
all have left behind, in order, so that the result does not depend on which one it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.mma_fragments import (
    BASE,
    affine_of,
    arrays,
    axis,
    codes_of,
    facts,
    load_tiles,
    values_of,
)
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.backend.cuda.kernels.skinny_gemm import SplitKScratch
from penstock.backend.cuda.pack_quantized import QuantizedWeight


class Tiling(NamedTuple):
    tiles: int  # of 16 rows of the matrix, in one program
    rows: int  # of x, in one program
    steps: int  # tiles of 64 columns at a time
    split: int  # programs that share the columns
    warps: int
    stages: int


@triton.jit
def sum_splits(shares, place, stride, inside, SPLIT: tl.constexpr):
    total = tl.load(shares + place, inside, 0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLIT):
        total += tl.load(shares + split * stride + place, inside, 0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["count"])
def _quant_gemm(
    x,
    low,
    high,
    scales,
    supers,
    bias,
    out,
    shares,
    arrived,
    count,
    rows,
    tiles,
    width,
    x_stride,
    out_stride,
    base,
    HIGH: tl.constexpr,
    GROUPS: tl.constexpr,
    MINIMA: tl.constexpr,
    SUPER: tl.constexpr,
    BFLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    SHIFTED: tl.constexpr,
    TABLE: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    T: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(0)
    item = tl.program_id(1) * N + tl.arange(0, N)
    split = tl.program_id(2)
    row = tl.minimum(block * R + axis(R, 2), tl.cdiv(rows, 16) - 1)
    column = tl.arange(0, 64 * T)
    share = tl.cdiv(tl.cdiv(tiles, T), SPLIT) * T
    total = tl.zeros([16 * R, N], tl.float32)
    if PDL:
        gdc_wait()
    for first in tl.range(split * share, tl.minimum((split + 1) * share, tiles), T, num_stages=STAGES):
        words, more, factors, outer = load_tiles(
            low, high, scales, supers, row, first, tiles, R, T, 0, EVEN, HIGH, GROUPS, MINIMA, SUPER
        )
        inside = (item < count)[:, None]
        if not EVEN:
            inside = inside & (first * 64 + column < width)[None, :]
        items = tl.load(x + first * 64 + item[:, None] * x_stride + column[None, :], inside, 0.0)
        scale, minimum = affine_of(factors, outer, R, T, 1, GROUPS, MINIMA, SUPER, ZERO, BFLOAT)
        codes = codes_of(words, more, base, HIGH, R, T, 1, TABLE)
        values = values_of(codes, scale, minimum, R, T, GROUPS, SHIFTED)
        if INTERPRET:
            total = tl.dot(values, tl.trans(items).to(tl.float32), total)
        else:
            total = tl.dot(values.to(tl.bfloat16), tl.trans(items), total)

    line = block * (16 * R) + tl.arange(0, 16 * R)[:, None]
    item = item[None, :].to(tl.int64)
    wanted = (line < rows) & (item < count)
    last = True
    if SPLIT > 1:
        place = item * rows + line
        stride = count.to(tl.int64) * rows
        tl.store(shares + split * stride + place, total, wanted)
        tl.debug_barrier()
        mine = arrived + tl.program_id(1) * tl.num_programs(0) + block
        last = tl.atomic_add(mine, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(mine, 0)
            total = sum_splits(shares, place, stride, wanted, SPLIT)
    if last:
        if BIAS:
            total += tl.load(bias + line, line < rows, 0.0)
        tl.store(out + item * out_stride + line, total.to(out.dtype.element_ty), wanted)


def quant_gemm(
    x: Any, weight: QuantizedWeight, bias: Any | None, out: Any, tiling: Tiling, scratch: SplitKScratch
) -> None:
    """out [T, rows] = x [T, width] @ weight.T (+ bias), of bfloat16."""
    grid = (triton.cdiv(weight.rows, 16 * tiling.tiles), triton.cdiv(len(x), tiling.rows), tiling.split)
    _quant_gemm[grid](
        x,
        *arrays(weight),
        weight.scales if bias is None else bias,
        out,
        scratch.partials,
        scratch.arrived,
        len(x),
        weight.rows,
        weight.tiles,
        weight.width,
        x.stride(0),
        out.stride(0),
        BASE,
        **facts(weight),
        BIAS=bias is not None,
        EVEN=weight.width % (64 * tiling.steps) == 0,
        R=tiling.tiles,
        N=tiling.rows,
        T=tiling.steps,
        SPLIT=tiling.split,
        STAGES=tiling.stages,
        INTERPRET=not x.is_cuda,
        **options(tiling.warps, tiling.stages, early=False),  # a step of 64 rows takes 6.7 ms so, 7.5 with early starts
    )
