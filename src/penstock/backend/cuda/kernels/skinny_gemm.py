"""Product of a few rows with a matrix, at the speed the matrix can be read.

The matrix takes the tensor cores' long side and the rows its short one. Columns are split over several programs when
the matrix alone does not fill the device; the last of them to finish adds up what all have left behind, in order, so
that the result does not depend on which one it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.backend.cuda.kernels.silu_and_mul import silu

MAX_SPLIT = 8
MAX_PARTIALS = 1 << 23  # values that programs of one product may leave for each other
MAX_TILES = 1 << 16


class Tiling(NamedTuple):
    rows: int  # of the matrix, in one program
    width: int  # columns at a time
    split: int  # programs that share the columns
    warps: int
    stages: int


@triton.jit
def _sum_parts(parts, place, stride, inside, SPLIT: tl.constexpr):
    total = tl.load(parts + place, inside, 0.0, cache_modifier=".cg")
    for part in tl.static_range(1, SPLIT):
        total += tl.load(parts + part * stride + place, inside, 0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["count"])
def _skinny_gemm(
    x,
    weight,
    bias,
    out,
    parts,
    arrived,
    count,
    rows,
    width,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    split = tl.program_id(0)
    tile = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    there = row < rows
    item = tl.arange(0, COUNT)
    column = tl.arange(0, WIDTH)
    lines = weight + row.to(tl.int64)[:, None] * width
    gates = weight + (row.to(tl.int64) + rows)[:, None] * width
    share = tl.cdiv(tl.cdiv(width, WIDTH), SPLIT) * WIDTH
    total = tl.zeros([ROWS, COUNT], tl.float32)
    gated = total
    if PDL:
        gdc_wait()
    for start in tl.range(split * share, tl.minimum((split + 1) * share, width), WIDTH):
        at = start + column
        inside = there[:, None] if EVEN else there[:, None] & (at < width)[None, :]
        items = (item < count)[None, :] if EVEN else (item < count)[None, :] & (at < width)[:, None]
        values = tl.load(x + item[None, :] * width + at[:, None], items, 0.0)  # [WIDTH, COUNT]
        total = tl.dot(tl.load(lines + at[None, :], inside, 0.0), values, total, input_precision="ieee")
        if GATED:
            gated = tl.dot(tl.load(gates + at[None, :], inside, 0.0), values, gated, input_precision="ieee")

    wanted = there[:, None] & (item < count)[None, :]
    place = item.to(tl.int64)[None, :] * rows + row[:, None]
    last = True
    if SPLIT > 1:
        stride = count.to(tl.int64) * rows
        mine = parts + split * stride
        tl.store(mine + place, total, wanted)
        if GATED:
            tl.store(mine + SPLIT * stride + place, gated, wanted)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(arrived + tile, 0)
            total = _sum_parts(parts, place, stride, wanted, SPLIT)
            if GATED:
                gated = _sum_parts(parts + SPLIT * stride, place, stride, wanted, SPLIT)
    if last:
        if BIAS:
            total += tl.load(bias + row, there, 0.0)[:, None]
        if GATED:
            if BIAS:
                gated += tl.load(bias + rows + row, there, 0.0)[:, None]
            total = silu(total) * gated
        tl.store(out + place, total.to(out.dtype.element_ty), wanted)


class SplitKScratch(NamedTuple):
    """What programs that share a row's columns leave for each other; `arrived` is all zeros between launches."""

    partials: Any  # float32
    arrived: Any  # int32, one for each tile

    @classmethod
    def on(cls, device: torch.device) -> SplitKScratch:
        return cls(torch.empty(MAX_PARTIALS, device=device), torch.zeros(MAX_TILES, dtype=torch.int32, device=device))


def skinny_gemm(
    x: Any, weight: Any, bias: Any | None, out: Any, tiling: Tiling, scratch: SplitKScratch, *, gated: bool = False
) -> None:
    """out [count, rows] = x [count, width] @ weight [rows, width].T; gated: silu of its first half times its second,
    so out is half as wide."""
    (count, width), rows = x.shape, out.shape[1]
    _skinny_gemm[(tiling.split, triton.cdiv(rows, tiling.rows))](
        x,
        weight,
        weight if bias is None else bias,
        out,
        scratch.partials,
        scratch.arrived,
        count,
        rows,
        width,
        GATED=gated,
        BIAS=bias is not None,
        EVEN=width % tiling.width == 0,
        COUNT=max(triton.next_power_of_2(count), 16),
        ROWS=tiling.rows,
        WIDTH=tiling.width,
        SPLIT=tiling.split,
        **options(tiling.warps, tiling.stages),
    )
