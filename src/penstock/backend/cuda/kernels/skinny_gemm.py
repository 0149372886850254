"""GEMM of a few rows with a matrix, at the speed the matrix can be read.

The matrix takes the tensor cores' long side and the rows its short one. Columns are split over several programs
(split_k.py) if the matrix does not fill the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.gemm_config import Epilogue, GemmConfig
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.silu_and_mul import silu
from penstock.backend.cuda.kernels.split_k import SplitKScratch, sum_splits


class Tiling(NamedTuple):
    """Says how a product is tiled: each program takes `rows` rows of the matrix."""

    rows: int  # per program
    width: int  # columns at a time
    split: int  # programs that share the columns
    warps: int
    stages: int


@triton.jit(do_not_specialize=["count"])
def _skinny_gemm(x, weight, bias, out, scratch, count, rows, width, CONFIG: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    ROWS: tl.constexpr = CONFIG.tiling.rows
    WIDTH: tl.constexpr = CONFIG.tiling.width
    SPLIT: tl.constexpr = CONFIG.tiling.split
    EPILOGUE: tl.constexpr = CONFIG.epilogue
    COUNT: tl.constexpr = CONFIG.columns
    EVEN: tl.constexpr = CONFIG.even
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
    wait_for_previous(PDL)
    for start in tl.range(split * share, tl.minimum((split + 1) * share, width), WIDTH):
        at = start + column
        inside = there[:, None] if EVEN else there[:, None] & (at < width)[None, :]
        items = (item < count)[None, :] if EVEN else (item < count)[None, :] & (at < width)[:, None]
        values = tl.load(x + item[None, :] * width + at[:, None], items, 0.0)  # [WIDTH, COUNT]
        total = tl.dot(tl.load(lines + at[None, :], inside, 0.0), values, total, input_precision="ieee")
        if EPILOGUE.gated:
            gated = tl.dot(tl.load(gates + at[None, :], inside, 0.0), values, gated, input_precision="ieee")

    wanted = there[:, None] & (item < count)[None, :]
    place = item.to(tl.int64)[None, :] * rows + row[:, None]
    last = True
    if SPLIT > 1:
        stride = count.to(tl.int64) * rows
        mine = scratch.partials + split * stride
        tl.store(mine + place, total, wanted)
        if EPILOGUE.gated:
            tl.store(mine + SPLIT * stride + place, gated, wanted)
        tl.debug_barrier()
        last = tl.atomic_add(scratch.arrived + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(scratch.arrived + tile, 0)
            total = sum_splits(scratch.partials, place, stride, wanted, SPLIT)
            if EPILOGUE.gated:
                gated = sum_splits(scratch.partials + SPLIT * stride, place, stride, wanted, SPLIT)
    if last:
        if EPILOGUE.bias:
            total += tl.load(bias + row, there, 0.0)[:, None]
        if EPILOGUE.gated:
            if EPILOGUE.bias:
                gated += tl.load(bias + rows + row, there, 0.0)[:, None]
            total = silu(total) * gated
        tl.store(out + place, total.to(out.dtype.element_ty), wanted)


def skinny_gemm(
    x: Any, weight: Any, bias: Any | None, out: Any, tiling: Tiling, scratch: SplitKScratch, *, gated: bool = False
) -> None:
    """Computes out [count, rows] = x [count, width] @ weight [rows, width].T (+ bias); gated: silu of its first half
    times its second, so out is half as wide."""
    (count, width), rows = x.shape, out.shape[1]
    epilogue, columns = Epilogue(gated, bias is not None), max(triton.next_power_of_2(count), 16)
    config = GemmConfig(tiling, epilogue, width % tiling.width == 0, columns=columns)
    grid = (tiling.split, triton.cdiv(rows, tiling.rows))
    _skinny_gemm[grid](
        x,
        weight,
        weight if bias is None else bias,
        out,
        scratch,
        count,
        rows,
        width,
        CONFIG=config,
        **launch_options(tiling.warps, tiling.stages),
    )
