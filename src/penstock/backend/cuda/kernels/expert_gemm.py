"""Products of rows with the matrices of their experts, which lie below each other in one.

Few rows: a program for each pair of a row and one of its experts, which reads a part of that expert's matrix. Many:
rows have seats (route.py), and a program multiplies a block of them with a part of their expert's matrix on the tensor
cores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.device_properties import INTERPRETER, DeviceProperties
from penstock.backend.cuda.kernels.expert_routing import ExpertPermutation, most_blocks
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
from penstock.backend.cuda.kernels.quant_gemm_small import add_product, add_sixteens, finish, load_rows, tile_rows
from penstock.backend.cuda.kernels.silu_and_mul import silu
from penstock.backend.cuda.pack_quantized import QuantizedWeight

LINES, WIDTH = 8, 512  # of a plain matrix, for one row
WARPS, STEPS, TILES = 4, 2, 1  # of a quantized one: see few.py


class ExpertRows(NamedTuple):
    """What is multiplied. Of each row of x there are `each` pairs, one after the other: with several experts, or with
    one."""

    x: Any  # [rows, width]
    experts: Any  # [pairs]
    each: int


@triton.jit
def _expert_gemv(
    x,
    weight,
    bias,
    out,
    experts,
    each,
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
    pair = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    if PDL:
        gdc_wait()
    line = tl.load(experts + pair).to(tl.int64) * (2 * rows if GATED else rows) + row
    x += (pair // each).to(tl.int64) * width
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    other = total  # of the row that this one gates
    for start in range(0, width, WIDTH):
        at = start + column
        value = tl.load(x + at, at < width, 0.0).to(tl.float32)[None, :]
        inside = (row < rows)[:, None] & (at < width)[None, :]
        total += tl.load(weight + line[:, None] * width + at[None, :], inside, 0.0).to(tl.float32) * value
        if GATED:
            other += tl.load(weight + (line + rows)[:, None] * width + at[None, :], inside, 0.0).to(tl.float32) * value
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias + line, row < rows, 0.0)
    if GATED:
        right = tl.sum(other, 1)
        if BIAS:
            right += tl.load(bias + rows + line, row < rows, 0.0)
        y = silu(y) * right
    tl.store(out + pair.to(tl.int64) * rows + row, y.to(out.dtype.element_ty), row < rows)


def expert_gemv(rows: ExpertRows, weight: Any, bias: Any | None, out: Any, gated: bool) -> None:
    """out [pairs, rows of an expert]; weight [experts * rows, width]. Gated: silu of the first half of an expert's rows
    times the second, so out is half as wide."""
    lines = out.shape[1]
    _expert_gemv[(triton.cdiv(lines, LINES), len(out))](
        rows.x,
        weight,
        weight if bias is None else bias,
        out,
        rows.experts,
        rows.each,
        lines,
        weight.shape[1],
        GATED=gated,
        BIAS=bias is not None,
        ROWS=LINES,
        WIDTH=min(WIDTH, triton.next_power_of_2(weight.shape[1])),
        **options(4),
    )


@triton.jit
def _quant_expert_gemv(
    x,
    low,
    high,
    scales,
    supers,
    bias,
    out,
    experts,
    each,
    rows,
    tiles,
    width,
    base,
    HIGH: tl.constexpr,
    GROUPS: tl.constexpr,
    MINIMA: tl.constexpr,
    SUPER: tl.constexpr,
    BFLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    SHIFTED: tl.constexpr,
    TABLE: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    pair = tl.program_id(1)
    first = tl.program_id(0)
    if PDL:
        gdc_wait()
    expert = tl.load(experts + pair)
    row = expert * (rows // 16) + tile_rows(first, rows, R, GATED)
    x += (pair // each).to(tl.int64) * width
    total = tl.zeros([G * (2 if GROUPS == 4 else GROUPS) * W, 16 * R, 4], tl.float32)
    for column in range(0, tiles, W * G):
        words, more, factors, outer = load_tiles(
            low, high, scales, supers, row, column, tiles, W, G, G, EVEN, HIGH, GROUPS, MINIMA, SUPER
        )
        items = load_rows(x, width, column, 1, width, W, G, 4, EVEN)
        scale, minimum = affine_of(factors, outer, W, G, R, GROUPS, MINIMA, SUPER, ZERO, BFLOAT)
        codes = codes_of(words, more, base, HIGH, W, G, R, TABLE)
        if GROUPS == 4:
            total = add_sixteens(total, codes, items, scale, minimum, W, G, R, 4, SHIFTED, INTERPRET)
        else:
            total = add_product(total, codes, items, scale, minimum, W, G, R, 4, GROUPS, SHIFTED, INTERPRET)
    out += pair.to(tl.int64) * (rows // 2 if GATED else rows)
    finish(tl.sum(total, 0), first, bias + expert.to(tl.int64) * rows, out, 1, rows, 0, R, 4, GATED, BIAS)


def quant_expert_gemv(rows: ExpertRows, weight: QuantizedWeight, bias: Any | None, out: Any, gated: bool) -> None:
    across = 1 << (weight.tiles - 1).bit_length()
    warps = min(WARPS, across)
    steps = min(STEPS, max(across // warps, 1))
    _quant_expert_gemv[(triton.cdiv(out.shape[1], 16 * TILES), len(out))](
        rows.x,
        *arrays(weight),
        weight.scales if bias is None else bias,
        out,
        rows.experts,
        rows.each,
        2 * out.shape[1] if gated else out.shape[1],
        weight.tiles,
        weight.width,
        BASE,
        **facts(weight),
        GATED=gated,
        BIAS=bias is not None,
        W=warps,
        G=steps,
        R=2 * TILES if gated else TILES,
        EVEN=weight.width % (64 * warps * steps) == 0,
        INTERPRET=not rows.x.is_cuda,
        **options(warps, 1),
    )


@triton.jit
def block_of(blocks, pairs, N: tl.constexpr):
    """A program's block: its expert, its pairs, and which of N there are."""
    entry = blocks + tl.program_id(1) * 3
    item = tl.arange(0, N)
    there = item < tl.load(entry + 2)
    pair = tl.load(pairs + tl.load(entry + 1) + item, there, 0)
    return tl.load(entry), pair, there


@triton.jit(do_not_specialize=["each"])
def _expert_gemm(
    x,
    weight,
    bias,
    out,
    pairs,
    counts,
    blocks,
    each,
    rows,
    width,
    COUNT: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    if PDL:
        gdc_wait()
    if tl.program_id(1) >= tl.load(counts + COUNT):
        return
    expert, pair, there = block_of(blocks, pairs, N)
    line = expert.to(tl.int64) * rows + row
    token = (pair // each).to(tl.int64)
    total = tl.zeros([ROWS, N], tl.float32)
    for start in tl.range(0, width, WIDTH):
        at = start + column
        inside = (row < rows)[:, None] if EVEN else (row < rows)[:, None] & (at < width)[None, :]
        items = there[None, :] if EVEN else there[None, :] & (at < width)[:, None]
        values = tl.load(x + token[None, :] * width + at[:, None], items, 0.0)
        lines = tl.load(weight + line[:, None] * width + at[None, :], inside, 0.0)
        total = tl.dot(lines, values, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + line, row < rows, 0.0)[:, None]
    place = pair.to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), (row < rows)[:, None] & there[None, :])


class BlockTiling(NamedTuple):
    """Says how a block of pairs is multiplied with a plain matrix."""

    rows: int  # of the matrix, in one program
    width: int  # columns at a time
    warps: int
    stages: int


def block_tiling(device: DeviceProperties, size: int, itemsize: int) -> BlockTiling:
    """Returns the tiling for blocks of `size` pairs."""
    rows, width = 64 if size <= 32 else 128, 256 // itemsize // (2 if size >= 64 else 1)
    stages = device.stages_that_fit(4 if itemsize == 2 else 2, (rows + size) * width * itemsize)
    return BlockTiling(rows, width, 4 if size <= 64 else 8, stages)


def expert_gemm(
    rows: ExpertRows,
    seats: ExpertPermutation,
    size: int,
    weight: Any,
    bias: Any | None,
    out: Any,
    device: DeviceProperties = INTERPRETER,
) -> None:
    """The same for blocks of `size` seats."""
    lines, width, count = out.shape[1], weight.shape[1], len(seats.counts) - 1
    tiling = block_tiling(device, size, weight.element_size())
    _expert_gemm[(triton.cdiv(lines, tiling.rows), most_blocks(len(out), count, size))](
        rows.x,
        weight,
        weight if bias is None else bias,
        out,
        *seats,
        rows.each,
        lines,
        width,
        COUNT=count,
        BIAS=bias is not None,
        EVEN=width % tiling.width == 0,
        N=size,
        ROWS=tiling.rows,
        WIDTH=tiling.width,
        **options(tiling.warps, tiling.stages),
    )


@triton.jit(do_not_specialize=["each"])
def _quant_expert_gemm(
    x,
    low,
    high,
    scales,
    supers,
    bias,
    out,
    pairs,
    counts,
    blocks,
    each,
    rows,
    tiles,
    width,
    base,
    HIGH: tl.constexpr,
    GROUPS: tl.constexpr,
    MINIMA: tl.constexpr,
    SUPER: tl.constexpr,
    BFLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    SHIFTED: tl.constexpr,
    TABLE: tl.constexpr,
    COUNT: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0)
    column = tl.arange(0, 64)
    if PDL:
        gdc_wait()
    if tl.program_id(1) >= tl.load(counts + COUNT):
        return
    expert, pair, there = block_of(blocks, pairs, N)
    row = expert * (rows // 16) + tl.minimum(first * R + axis(R, 2), rows // 16 - 1)
    token = (pair // each).to(tl.int64)
    total = tl.zeros([16 * R, N], tl.float32)
    for tile in tl.range(0, tiles, 1, num_stages=STAGES):
        words, more, factors, outer = load_tiles(
            low, high, scales, supers, row, tile, tiles, R, 1, 0, True, HIGH, GROUPS, MINIMA, SUPER
        )
        inside = there[:, None]
        if not EVEN:
            inside = inside & (tile * 64 + column < width)[None, :]
        items = tl.load(x + token[:, None] * width + (tile * 64 + column)[None, :], inside, 0.0)
        scale, minimum = affine_of(factors, outer, R, 1, 1, GROUPS, MINIMA, SUPER, ZERO, BFLOAT)
        codes = codes_of(words, more, base, HIGH, R, 1, 1, TABLE)
        values = values_of(codes, scale, minimum, R, 1, GROUPS, SHIFTED)
        if INTERPRET:
            total = tl.dot(values, tl.trans(items).to(tl.float32), total)
        else:
            total = tl.dot(values.to(tl.bfloat16), tl.trans(items), total)
    line = first * (16 * R) + tl.arange(0, 16 * R)
    if BIAS:
        total += tl.load(bias + expert.to(tl.int64) * rows + line, line < rows, 0.0)[:, None]
    place = pair.to(tl.int64)[None, :] * rows + line[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), (line < rows)[:, None] & there[None, :])


def quant_expert_gemm(
    rows: ExpertRows, seats: ExpertPermutation, size: int, weight: QuantizedWeight, bias: Any | None, out: Any
) -> None:
    lines, count = out.shape[1], len(seats.counts) - 1
    _quant_expert_gemm[(triton.cdiv(lines, 64), most_blocks(len(out), count, size))](
        rows.x,
        *arrays(weight),
        weight.scales if bias is None else bias,
        out,
        *seats,
        rows.each,
        lines,
        weight.tiles,
        weight.width,
        BASE,
        **facts(weight),
        COUNT=count,
        BIAS=bias is not None,
        EVEN=weight.width % 64 == 0,
        R=4,
        N=size,
        STAGES=3,
        INTERPRET=not rows.x.is_cuda,
        **options(4, 3, early=False),
    )
