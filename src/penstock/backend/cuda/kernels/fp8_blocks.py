"""Products with matrices of float8 (e4m3) whose values share a scale in every 128 columns of a row.

That is what checkpoints with scales for blocks of 128 rows and 128 columns become: the same scale for 128 rows, which
takes 3 % more memory and lets any rows lie below each other. What 128 columns add up to is scaled in float32. Up to 16
rows are multiplied in bfloat16 as they are; more are quantized first, each with a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.backend.cuda.kernels.quant_gemm import sum_splits
from penstock.backend.cuda.kernels.skinny_gemm import SplitKScratch

COLUMNS = 128  # that share a scale


@dataclass(frozen=True, slots=True)
class Fp8BlockWeight:
    values: Any  # [rows, width] float8_e4m3fn
    scales: Any  # [width / 128, rows] float32

    @property
    def rows(self) -> int:
        return int(self.values.shape[0])

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    @property
    def bytes(self) -> int:
        return self.rows * self.width + 4 * int(self.scales.numel())


class Tiling(NamedTuple):
    rows: int  # of the matrix, in one program
    items: int  # rows of x
    split: int  # programs that share the columns
    warps: int
    stages: int


@triton.jit(do_not_specialize=["count"])
def _fp8_block_gemm(
    x,
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
    x_stride,
    out_stride,
    FLOAT8: tl.constexpr,
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
    share = tl.cdiv(tl.cdiv(width, K), SPLIT)
    total = tl.zeros([M, N], tl.float32)
    row = tl.minimum(line, rows - 1)
    at = values + row.to(tl.int64)[:, None] * width + column[None, :]
    items_at = x + tl.minimum(item, count - 1).to(tl.int64)[None, :] * x_stride + column[:, None]
    if PDL:
        gdc_wait()
    for step in tl.range(split * share, tl.minimum((split + 1) * share, tl.cdiv(width, K))):
        inside = step * K + column < width
        weights = tl.load(at + step * K, inside[None, :], 0.0)
        items = tl.load(items_at + step * K, inside[:, None], 0.0)
        scale = tl.load(scales + step * rows + row)
        if INTERPRET:
            product = tl.dot(weights.to(tl.float32), items.to(tl.float32))
        elif FLOAT8:
            product = tl.dot(weights, items)
        else:
            product = tl.dot(weights.to(tl.bfloat16), items)
        total += product * scale[:, None]

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
        if FLOAT8:
            total *= tl.load(item_scales + item, item < count, 0.0)
        if BIAS:
            total += tl.load(bias + line, line < rows, 0.0)
        tl.store(out + item * out_stride + line, total.to(out.dtype.element_ty), wanted)


def fp8_block_gemm(
    x: Any,
    item_scales: Any | None,
    weight: Fp8BlockWeight,
    bias: Any | None,
    out: Any,
    tiling: Tiling,
    scratch: SplitKScratch,
) -> None:
    """out [T, rows] = x [T, width] @ weight.T (+ bias) of bfloat16; of float8 where x has scales [T]."""
    grid = (triton.cdiv(weight.rows, tiling.rows), triton.cdiv(len(x), tiling.items), tiling.split)
    _fp8_block_gemm[grid](
        x,
        weight.scales if item_scales is None else item_scales,
        weight.values,
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        scratch.partials,
        scratch.arrived,
        len(x),
        weight.rows,
        weight.width,
        x.stride(0),
        out.stride(0),
        FLOAT8=item_scales is not None,
        BIAS=bias is not None,
        M=tiling.rows,
        N=tiling.items,
        K=COLUMNS,
        SPLIT=tiling.split,
        INTERPRET=not x.is_cuda,
        **options(tiling.warps, tiling.stages),
    )


@triton.jit
def _gather_fp8_blocks(tokens, values, scales, out, rows, width, K: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    item = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    column = step * K + tl.arange(0, K)
    if PDL:
        gdc_wait()
    row = tl.load(tokens + item).to(tl.int64)
    scale = tl.load(scales + step * rows + row)
    line = tl.load(values + row * width + column, column < width, 0.0).to(tl.float32) * scale
    tl.store(out + item * width + column, line.to(out.dtype.element_ty), column < width)


def gather_fp8_blocks(weight: Fp8BlockWeight, tokens: Any, out: Any) -> None:
    """out[i] = weight[tokens[i]]."""
    grid = (len(tokens), len(weight.scales))
    _gather_fp8_blocks[grid](
        tokens, weight.values, weight.scales, out, weight.rows, weight.width, K=COLUMNS, **options()
    )
