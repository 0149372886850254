"""GEMV: the product of one row with a matrix, as fast as the matrix can be read."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.gemm_config import Epilogue
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.silu_and_mul import silu


class Tiling(NamedTuple):
    """Says how a product is tiled: each program takes `rows` rows of the matrix."""

    rows: int  # per program
    width: int  # columns at a time
    warps: int


DEFAULT = Tiling(4, 1024, 4)


@triton.jit
def store_row(y, gate, bias, row, rows, out, line, EPILOGUE: tl.constexpr):
    """Stores sums y of the rows at `row` after their epilogue; `line`: where their bias is. `gate` [rows] multiplies
    them where the product is gated."""
    if EPILOGUE.bias:
        y += tl.load(bias + line, row < rows, 0.0)
    if EPILOGUE.gated:
        gated = tl.sum(gate, 1)
        if EPILOGUE.bias:
            gated += tl.load(bias + rows + line, row < rows, 0.0)
        y = silu(y) * gated
    tl.store(out + row, y.to(out.dtype.element_ty), row < rows)


@triton.jit(do_not_specialize=["rows"])
def _gemv(x, weight, bias, out, rows, width, EPILOGUE: tl.constexpr, TILING: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    ROWS: tl.constexpr = TILING.rows
    WIDTH: tl.constexpr = TILING.width
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row < rows)[:, None]
    line = weight + row.to(tl.int64)[:, None] * width
    other = line + rows.to(tl.int64) * width  # the row that this one gates, when gated
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    other_total = total
    inside = there & (column < width)[None, :]
    tile = tl.load(line + column[None, :], inside, 0.0)
    other_tile = tile
    if EPILOGUE.gated:
        other_tile = tl.load(other + column[None, :], inside, 0.0)
    wait_for_previous(PDL)
    for start in range(0, width, WIDTH):
        value = tl.load(x + start + column, start + column < width, 0.0).to(tl.float32)[None, :]
        total += tile.to(tl.float32) * value
        if EPILOGUE.gated:
            other_total += other_tile.to(tl.float32) * value
        ahead = start + WIDTH + column
        inside = there & (ahead < width)[None, :]
        tile = tl.load(line + ahead[None, :], inside, 0.0)
        if EPILOGUE.gated:
            other_tile = tl.load(other + ahead[None, :], inside, 0.0)
    store_row(tl.sum(total, 1), other_total, bias, row, rows, out, row, EPILOGUE)


def gemv(x: Any, weight: Any, bias: Any | None, out: Any, *, gated: bool = False, tiling: Tiling = DEFAULT) -> None:
    """Computes out [1, rows] = x [1, width] @ weight [rows, width].T (+ bias); gated: silu of its first half times its
    second, so out is half as wide."""
    rows, width = out.shape[1], weight.shape[1]
    epilogue, vector = Epilogue(gated, bias is not None), weight if bias is None else bias
    _gemv[(triton.cdiv(rows, tiling.rows),)](
        x, weight, vector, out, rows, width, EPILOGUE=epilogue, TILING=tiling, **launch_options(tiling.warps)
    )
