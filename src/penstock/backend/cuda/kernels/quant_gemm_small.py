"""Product of up to 16 rows with a quantized matrix, at the speed the matrix can be read.

A program takes 16 * R rows of the matrix; its W warps share their columns. The matrix takes the long side of the
tensor cores, the few rows the short one. Codes enter the product as they are: what a group of columns adds up to is
then scaled, and the minimum times the sum of the rows' values is added, both in float32.
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
    halves,
    load_tiles,
)
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.backend.cuda.pack_quantized import QuantizedWeight


class Tiling(NamedTuple):
    warps: int
    steps: int  # tiles of a row that a warp takes at a time
    tiles: int  # of 16 rows, in one program
    stages: int = 1


DEFAULT = Tiling(8, 2, 1)


@triton.jit
def dot(a, b, INTERPRET: tl.constexpr):
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


@triton.jit
def load_rows(
    x,
    stride,
    column,
    count,
    width,
    W: tl.constexpr,
    G: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The rows as the tensor cores read them: words of [t, g, W, G, column / 8, (c, side)]. Where 4 columns are enough,
    every other one is a row: a lane then has no more than one to scale."""
    at = x + column * 64 + (axis(8, 1) * stride if COLUMNS > 4 else axis(8, 1) // 2 * stride)
    at = at + axis(W, 2) * (G * 64) + axis(4, 0) * 2 + axis(G, 3) * 64 + axis(8, 5) * 8
    if COLUMNS == 4:
        inside = (axis(8, 1) % 2 == 0) & (axis(8, 1) // 2 < count)
    else:
        at = at + axis(COLUMNS // 8, 4) * (8 * stride)
        inside = axis(COLUMNS // 8, 4) * 8 + axis(8, 1) < count
    if not EVEN:
        place = column * 64 + axis(W, 2) * (G * 64) + axis(4, 0) * 2 + axis(G, 3) * 64 + axis(8, 5) * 8
        inside = inside & (place < width)
    return tl.load(at.to(tl.pointer_type(tl.int32)), inside, 0)


@triton.jit
def spread(factor, BATCH: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr):
    """[t, g, W, G, R, group, half] -> [BATCH, M, COLUMNS], the same for every column."""
    factor = tl.permute(factor, [3, 5, 2, 4, 6, 1, 0])
    if COLUMNS == 4:
        return tl.reshape(factor, [BATCH, M, 4])
    else:
        factor = tl.reshape(factor, [BATCH, M, 1, 4, 1])
        return tl.reshape(tl.broadcast_to(factor, [BATCH, M, COLUMNS // 8, 4, 2]), [BATCH, M, COLUMNS])


@triton.jit
def used(product, BATCH: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr):
    """Without the columns between, where there are only 4 rows."""
    if COLUMNS == 4:
        even, _ = tl.split(tl.reshape(product, [BATCH, M, 4, 2]))
        return even
    else:
        return product


@triton.jit
def add_product(
    total,
    codes,
    words,
    scale,
    minimum,
    W: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    MINIMA: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """For groups of 32 columns or more, GROUPS in a tile."""
    BATCH: tl.constexpr = G * GROUPS * W
    M: tl.constexpr = 16 * R
    K: tl.constexpr = 64 // GROUPS
    N: tl.constexpr = 8 if COLUMNS == 4 else COLUMNS
    #           [t, g, W, G, R, group, pair, c, half, side, e] to [G, group, W | R, half, g | pair, side, t, c, e]
    a = tl.reshape(codes.to(tl.bfloat16), [4, 8, W, G, R, GROUPS, 2 // GROUPS, 2, 2, 2, 2])
    a = tl.reshape(tl.permute(a, [3, 5, 2, 4, 8, 1, 6, 9, 0, 7, 10]), [BATCH, M, K])
    #           [t, g, W, G, n, group, pair, c, side, e] to [G, group, W | pair, side, t, c, e | n, g]
    b = tl.reshape(halves(words.to(tl.uint32, bitcast=True)), [4, 8, W, G, N // 8, GROUPS, 2 // GROUPS, 2, 2, 2])
    b = tl.reshape(tl.permute(b, [3, 5, 2, 6, 8, 0, 7, 9, 4, 1]), [BATCH, K, N])
    product = used(dot(a, b, INTERPRET), BATCH, M, COLUMNS)
    total += product * spread(scale, BATCH, M, COLUMNS)
    if MINIMA:
        sums = used(dot(tl.full([BATCH, M, K], 1.0, tl.float32).to(tl.bfloat16), b, INTERPRET), BATCH, M, COLUMNS)
        total += sums * spread(minimum, BATCH, M, COLUMNS)
    return total


@triton.jit
def each_step(factor, W: tl.constexpr, G: tl.constexpr, R: tl.constexpr):
    """Of four groups of 16 columns: those of even steps, and those of odd ones."""
    factor = tl.reshape(factor, [4, 8, W, G, R, 2, 2, 2])
    return tl.split(tl.permute(factor, [0, 1, 2, 3, 4, 5, 7, 6]))


@triton.jit
def add_sixteens(
    total,
    codes,
    words,
    scale,
    minimum,
    W: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    MINIMA: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """For groups of 16 columns: two products of 32, each with half of the rows' values."""
    even = axis(8, 5) // 2 % 2 == 0
    scales = each_step(scale, W, G, R)
    minima = each_step(minimum, W, G, R)
    first, second = tl.where(even, words, 0), tl.where(even, 0, words)
    total = add_product(total, codes, first, scales[0], minima[0], W, G, R, COLUMNS, 2, MINIMA, INTERPRET)
    return add_product(total, codes, second, scales[1], minima[1], W, G, R, COLUMNS, 2, MINIMA, INTERPRET)


@triton.jit
def tile_rows(first, rows, R: tl.constexpr, GATED: tl.constexpr):
    """Which rows of tiles a program takes: R in a run, or half of them where the second half of the matrix begins."""
    height = tl.cdiv(rows, 16)
    if GATED:
        row = first * (R // 2) + axis(R, 4) % (R // 2) + axis(R, 4) // (R // 2) * (height // 2)
    else:
        row = first * R + axis(R, 4)
    return tl.minimum(row, height - 1)


@triton.jit
def finish(
    y,
    first,
    bias,
    out,
    count,
    rows,
    out_stride,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Stores a program's sums [16 * R, COLUMNS]."""
    item = tl.arange(0, COLUMNS)[None, :]
    if GATED:
        line = first * (8 * R) + tl.arange(0, 8 * R)[:, None]
        left, right = tl.split(tl.permute(tl.reshape(y, [2, 8 * R, COLUMNS]), [1, 2, 0]))
        if BIAS:
            left += tl.load(bias + line, line < rows // 2, 0.0)
            right += tl.load(bias + rows // 2 + line, line < rows // 2, 0.0)
        y = left / (1 + tl.exp(-left)) * right
        inside = (line < rows // 2) & (item < count)
    else:
        line = first * (16 * R) + tl.arange(0, 16 * R)[:, None]
        if BIAS:
            y += tl.load(bias + line, line < rows, 0.0)
        inside = (line < rows) & (item < count)
    tl.store(out + item.to(tl.int64) * out_stride + line, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def _quant_gemm_small(
    x,
    low,
    high,
    scales,
    supers,
    bias,
    out,
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
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0)
    row = tile_rows(first, rows, R, GATED)
    total = tl.zeros([G * (2 if GROUPS == 4 else GROUPS) * W, 16 * R, COLUMNS], tl.float32)
    words, more, factors, outer = load_tiles(
        low, high, scales, supers, row, 0, tiles, W, G, G, EVEN, HIGH, GROUPS, MINIMA, SUPER
    )
    if PDL:
        gdc_wait()
    for column in range(0, tiles, W * G):
        items = load_rows(x, x_stride, column, count, width, W, G, COLUMNS, EVEN)
        next_words, next_more, next_factors, next_outer = load_tiles(
            low, high, scales, supers, row, column + W * G, tiles, W, G, G, False, HIGH, GROUPS, MINIMA, SUPER
        )
        scale, minimum = affine_of(factors, outer, W, G, R, GROUPS, MINIMA, SUPER, ZERO, BFLOAT)
        codes = codes_of(words, more, base, HIGH, W, G, R, TABLE)
        if GROUPS == 4:
            total = add_sixteens(total, codes, items, scale, minimum, W, G, R, COLUMNS, SHIFTED, INTERPRET)
        else:
            total = add_product(total, codes, items, scale, minimum, W, G, R, COLUMNS, GROUPS, SHIFTED, INTERPRET)
        words, more, factors, outer = next_words, next_more, next_factors, next_outer
    y = tl.sum(total, 0)
    finish(y, first, bias, out, count, rows, out_stride, R, COLUMNS, GATED, BIAS)


def quant_gemm_small(
    x: Any, weight: QuantizedWeight, bias: Any | None, out: Any, *, gated: bool = False, tiling: Tiling = DEFAULT
) -> None:
    """out [T, rows] = x [T, width] @ weight.T (+ bias) for up to 16 rows of bfloat16; gated: silu of its first half
    times its second, so out is half as wide."""
    programs = triton.cdiv(out.shape[1], 16 * tiling.tiles // (2 if gated else 1))
    _quant_gemm_small[(programs,)](
        x,
        *arrays(weight),
        weight.scales if bias is None else bias,
        out,
        len(x),
        weight.rows,
        weight.tiles,
        weight.width,
        x.stride(0),
        out.stride(0),
        BASE,
        **facts(weight),
        GATED=gated,
        BIAS=bias is not None,
        COLUMNS=4 if len(x) <= 4 else 8 if len(x) <= 8 else 16,
        W=tiling.warps,
        G=tiling.steps,
        R=tiling.tiles,
        EVEN=weight.width % (64 * tiling.warps * tiling.steps) == 0,
        INTERPRET=not x.is_cuda,
        **options(tiling.warps, tiling.stages),
    )
