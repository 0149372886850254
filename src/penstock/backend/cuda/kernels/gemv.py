"""Product of one row with a matrix: as fast as the matrix can be read."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.backend.cuda.kernels.silu_and_mul import silu


class Tiling(NamedTuple):
    rows: int  # of the matrix, in one program
    width: int  # columns at a time
    warps: int


DEFAULT = Tiling(4, 1024, 4)


@triton.jit(do_not_specialize=["rows"])
def _gemv(
    x,
    weight,
    bias,
    out,
    rows,
    width,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row < rows)[:, None]
    line = weight + row.to(tl.int64)[:, None] * width
    other = line + rows.to(tl.int64) * width  # the row that this one gates, when GATED
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    other_total = total
    inside = there & (column < width)[None, :]
    tile = tl.load(line + column[None, :], inside, 0.0)
    other_tile = tile
    if GATED:
        other_tile = tl.load(other + column[None, :], inside, 0.0)
    if PDL:
        gdc_wait()
    for start in range(0, width, WIDTH):
        value = tl.load(x + start + column, start + column < width, 0.0).to(tl.float32)[None, :]
        total += tile.to(tl.float32) * value
        if GATED:
            other_total += other_tile.to(tl.float32) * value
        ahead = start + WIDTH + column
        inside = there & (ahead < width)[None, :]
        tile = tl.load(line + ahead[None, :], inside, 0.0)
        if GATED:
            other_tile = tl.load(other + ahead[None, :], inside, 0.0)
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias + row, row < rows, 0.0)
    if GATED:
        gated = tl.sum(other_total, 1)
        if BIAS:
            gated += tl.load(bias + rows + row, row < rows, 0.0)
        y = silu(y) * gated
    tl.store(out + row, y.to(out.dtype.element_ty), row < rows)


def gemv(x: Any, weight: Any, bias: Any | None, out: Any, *, gated: bool = False, tiling: Tiling = DEFAULT) -> None:
    """out [1, rows] = x [1, width] @ weight [rows, width].T; gated: silu of its first half times its second, so out is
    half as wide."""
    rows, width = out.shape[1], weight.shape[1]
    _gemv[(triton.cdiv(rows, tiling.rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        width,
        GATED=gated,
        BIAS=bias is not None,
        ROWS=tiling.rows,
        WIDTH=tiling.width,
        **options(tiling.warps),
    )
