"""Product of some tens of rows of float8 with a matrix of float8, on the tensor cores.

The library is slow for few rows when every row has a scale. Columns are split over programs as in many.py.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.fp8 import Fp8Weight
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.backend.cuda.kernels.quant_gemm import Tiling, sum_splits
from penstock.backend.cuda.kernels.skinny_gemm import SplitKScratch


@triton.jit(do_not_specialize=["count"])
def _fp8_gemm(
    codes,
    item_scales,
    values,
    scales,
    bias,
    out,
    shares,
    arrived,
    count,
    rows,
    width,
    out_stride,
    BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(0)
    line = block * M + tl.arange(0, M)
    item = tl.program_id(1) * N + tl.arange(0, N)
    split = tl.program_id(2)
    column = tl.arange(0, K)
    share = tl.cdiv(tl.cdiv(width, K), SPLIT) * K
    total = tl.zeros([M, N], tl.float32)
    at = values + tl.minimum(line, rows - 1).to(tl.int64)[:, None] * width + column[None, :]
    items_at = codes + tl.minimum(item, count - 1)[None, :] * width + column[:, None]
    if PDL:
        gdc_wait()
    for first in tl.range(split * share, tl.minimum((split + 1) * share, width), K):
        inside = first + column < width
        weights = tl.load(at + first, inside[None, :], 0.0)
        items = tl.load(items_at + first, inside[:, None], 0.0)
        if INTERPRET:
            total = tl.dot(weights.to(tl.float32), items.to(tl.float32), total)
        else:
            total = tl.dot(weights, items, total, max_num_imprecise_acc=128 if K >= 128 else K)

    line = line[:, None]
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
        total *= tl.load(scales + line, line < rows, 0.0) * tl.load(item_scales + item, item < count, 0.0)
        if BIAS:
            total += tl.load(bias + line, line < rows, 0.0)
        tl.store(out + item * out_stride + line, total.to(out.dtype.element_ty), wanted)


def fp8_gemm(
    codes: Any, item_scales: Any, weight: Fp8Weight, bias: Any | None, out: Any, tiling: Tiling, scratch: SplitKScratch
) -> None:
    """out [T, rows] = (codes [T, width] * item_scales [T]) @ weight.T (+ bias)."""
    grid = (triton.cdiv(weight.rows, 16 * tiling.tiles), triton.cdiv(len(codes), tiling.rows), tiling.split)
    _fp8_gemm[grid](
        codes,
        item_scales,
        weight.values,
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        scratch.partials,
        scratch.arrived,
        len(codes),
        weight.rows,
        weight.width,
        out.stride(0),
        BIAS=bias is not None,
        M=16 * tiling.tiles,
        N=tiling.rows,
        K=64 * tiling.steps,
        SPLIT=tiling.split,
        INTERPRET=not codes.is_cuda,
        **options(tiling.warps, tiling.stages),
    )
