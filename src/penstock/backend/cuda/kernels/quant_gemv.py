"""Product of one row with a quantized matrix: eight groups of columns side by side.

The short side of the tensor cores has room for eight rows of x. One row is put there eight times, each time without all
but one of eight neighbouring groups of columns, so that one product gives what each group adds up to, in the lane that
has its scale. Every lane loads a different part of the row and of the scales. Shapes are those of fragments.py, with
blocks of eight groups along axis B.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.mma_fragments import (
    BASE,
    apart,
    arrays,
    axis,
    bfloat16_of,
    codes_of,
    facts,
    float16_of,
    halves,
    int8_of,
    load_words,
)
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.backend.cuda.kernels.quant_gemm_small import dot, finish, tile_rows
from penstock.backend.cuda.pack_quantized import QuantizedWeight


class Tiling(NamedTuple):
    warps: int
    blocks: int  # of eight groups that a warp takes at a time
    tiles: int  # of 16 rows, in one program
    ahead: int  # times that much is loaded before it is needed: 1 or 2


@triton.jit
def load_row(x, column, width, W: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Group g of each block, for lanes of that g: words of [t, g, W, S, 1, (c, side)]."""
    SIZE: tl.constexpr = 64 // GROUPS
    place = column * 64 + axis(W, 2) * (S * 8 * SIZE) + axis(S, 3) * (8 * SIZE)
    place = place + axis(8, 1) * SIZE + axis(4, 0) * 2 + axis(SIZE // 8, 5) * 8
    at = (x + place).to(tl.pointer_type(tl.int32))
    return (tl.load(at) if EVEN else tl.load(at, place < width, 0)).to(tl.uint32, bitcast=True)


@triton.jit
def load_factors(
    words,
    row,
    column,
    tiles,
    W: tl.constexpr,
    S: tl.constexpr,
    TILES: tl.constexpr,
    EVEN: tl.constexpr,
    N: tl.constexpr,
):
    """Of N words for each tile and g, those of groups 2 * t and 2 * t + 1 of each block: [t, g, W, S, R, words]."""
    MINE: tl.constexpr = N * TILES // 4
    tile = column + axis(W, 2) * (S * TILES) + axis(S, 3) * TILES + axis(4, 0) * TILES // 4
    lane = axis(8, 1) * N + axis(4, 0) * MINE % N
    at = apart(words, lane) if N == 1 else words + lane
    at = at + row * (tiles * 8 * N) + tile * (8 * N) + axis(MINE, 5)
    return tl.load(at) if EVEN else tl.load(at, tile < tiles, 0)


@triton.jit
def load_supers(
    words,
    row,
    column,
    tiles,
    W: tl.constexpr,
    S: tl.constexpr,
    TILES: tl.constexpr,
    EVEN: tl.constexpr,
    N: tl.constexpr,
):
    tile = column + axis(W, 2) * (S * TILES) + axis(S, 3) * TILES + axis(4, 0) * 0
    at = words + row * (tl.cdiv(tiles, 4) * 8 * N) + tile // 4 * (8 * N) + axis(8, 1) * N + axis(N, 5)
    return tl.load(at) if EVEN else tl.load(at, tile < tiles, 0)


@triton.jit
def load_blocks(
    low,
    high,
    scales,
    supers,
    row,
    column,
    tiles,
    W: tl.constexpr,
    S: tl.constexpr,
    EVEN: tl.constexpr,
    HIGH: tl.constexpr,
    GROUPS: tl.constexpr,
    MINIMA: tl.constexpr,
    SUPER: tl.constexpr,
):
    """Low bits, high bits, factors and theirs."""
    TILES: tl.constexpr = 8 // GROUPS
    G: tl.constexpr = S * TILES
    words = load_words(low, row, column, tiles, W, G, G, EVEN, 8 if HIGH == 4 else 4)
    more = words
    if HIGH == 1 or HIGH == 2:
        more = load_words(high, row, column, tiles, W, G, G, EVEN, HIGH)
    EACH: tl.constexpr = 2 if MINIMA else 1
    N: tl.constexpr = GROUPS * EACH // 2 if SUPER else GROUPS * EACH
    factors = load_factors(scales, row, column, tiles, W, S, TILES, EVEN, N)
    outer = factors
    if SUPER:
        outer = load_supers(supers, row, column, tiles, W, S, TILES, EVEN, EACH)
    return words, more, factors, outer


@triton.jit
def side_by_side(words, W: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr):
    """Each group of a block in a column of its own: [S * W, columns of x, 8]."""
    words = tl.where(axis(8, 1) == axis(8, 4), words, 0)  # [t, g, W, S, group, (c, side)]
    #           [t, g, W, S, pair, c, side, e] to [S, W | pair, side, t, c, e | g]
    b = tl.reshape(halves(words), [4, 8, W, S, 16 // GROUPS, 2, 2, 2])
    return tl.reshape(tl.permute(b, [3, 2, 4, 6, 0, 5, 7, 1]), [S * W, 512 // GROUPS, 8])


@triton.jit
def above(words, W: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr):
    """Each group in its column, all of them from the top: [S * W, 32, 8]."""
    if GROUPS == 4:
        words = tl.permute(tl.join(words, words & 0), [0, 1, 2, 3, 4, 6, 5])
    b = tl.reshape(halves(words), [4, 8, W, S, 2, 2, 2])
    return tl.reshape(tl.permute(b, [3, 2, 5, 0, 4, 6, 1]), [S * W, 32, 8])


@triton.jit
def spread(factor, W: tl.constexpr, S: tl.constexpr, R: tl.constexpr):
    """[t, g, W, S, R, e, half] -> [S * W, 16 * R, 8]."""
    return tl.reshape(tl.permute(factor, [3, 2, 4, 6, 1, 0, 5]), [S * W, 16 * R, 8])


@triton.jit
def affine(
    factors,
    supers,
    W: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    MINIMA: tl.constexpr,
    SUPER: tl.constexpr,
    ZERO: tl.constexpr,
    BFLOAT: tl.constexpr,
):
    """What a group's sum is multiplied with, and what the sum of its part of the row is: [S * W, 16 * R, 8] each."""
    EACH: tl.constexpr = 2 if MINIMA else 1
    numbers = int8_of(factors) if SUPER else bfloat16_of(factors) if BFLOAT else float16_of(factors)
    numbers = tl.reshape(numbers, [4, 8, W, S, R, 2, 2, EACH])  # e, half
    if SUPER:
        numbers *= tl.reshape(float16_of(supers), [4, 8, W, S, R, 1, 2, EACH])
    if MINIMA:
        scale, minimum = tl.split(numbers)
        minimum -= ZERO * scale
    else:
        scale = tl.reshape(numbers, [4, 8, W, S, R, 2, 2])
        minimum = scale * -ZERO
    return spread(scale, W, S, R), spread(minimum, W, S, R)


@triton.jit
def add_blocks(
    total,
    codes,
    items,
    scale,
    minimum,
    W: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFTED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    TILES: tl.constexpr = 8 // GROUPS
    #           [t, g, W, S, tile, R, pair, c, half, side, e] to [S, W | R, half, g | tile, pair, side, t, c, e]
    a = tl.reshape(codes.to(tl.bfloat16), [4, 8, W, S, TILES, R, 2, 2, 2, 2, 2])
    a = tl.reshape(tl.permute(a, [3, 2, 5, 8, 1, 4, 6, 9, 0, 7, 10]), [S * W, 16 * R, 64 * TILES])
    total += dot(a, side_by_side(items, W, S, GROUPS), INTERPRET) * scale
    if SHIFTED:
        ones = tl.full([S * W, 16 * R, 32], 1.0, tl.float32).to(tl.bfloat16)
        total += dot(ones, above(items, W, S, GROUPS), INTERPRET) * minimum
    return total


@triton.jit
def _quant_gemv(
    x,
    low,
    high,
    scales,
    supers,
    bias,
    out,
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
    S: tl.constexpr,
    R: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    STEP: tl.constexpr = W * S * (8 // GROUPS)
    first = tl.program_id(0)
    row = tile_rows(first, rows, R, GATED)
    total = tl.zeros([S * W, 16 * R, 8], tl.float32)
    words, more, factors, outer = load_blocks(
        low, high, scales, supers, row, 0, tiles, W, S, EVEN, HIGH, GROUPS, MINIMA, SUPER
    )
    next_words, next_more, next_factors, next_outer = words, more, factors, outer
    if AHEAD == 2:
        next_words, next_more, next_factors, next_outer = load_blocks(
            low, high, scales, supers, row, STEP, tiles, W, S, False, HIGH, GROUPS, MINIMA, SUPER
        )
    if PDL:
        gdc_wait()
    items = load_row(x, 0, width, W, S, GROUPS, EVEN)
    for column in tl.range(0, tiles, STEP, loop_unroll_factor=3 if AHEAD == 2 else 1):
        next_items = load_row(x, column + STEP, width, W, S, GROUPS, False)
        last_words, last_more, last_factors, last_outer = load_blocks(
            low, high, scales, supers, row, column + AHEAD * STEP, tiles, W, S, False, HIGH, GROUPS, MINIMA, SUPER
        )
        scale, minimum = affine(factors, outer, W, S, R, MINIMA, SUPER, ZERO, BFLOAT)
        codes = codes_of(words, more, base, HIGH, W, S * (8 // GROUPS), R, TABLE)
        total = add_blocks(total, codes, items, scale, minimum, W, S, R, GROUPS, SHIFTED, INTERPRET)
        if AHEAD == 2:
            words, more, factors, outer = next_words, next_more, next_factors, next_outer
            next_words, next_more, next_factors, next_outer = last_words, last_more, last_factors, last_outer
        else:
            words, more, factors, outer = last_words, last_more, last_factors, last_outer
        items = next_items
    y = tl.expand_dims(tl.sum(tl.sum(total, 0), 1), 1)
    finish(y, first, bias, out, 1, rows, 0, R, 1, GATED, BIAS)


def quant_gemv(
    x: Any, weight: QuantizedWeight, bias: Any | None, out: Any, *, gated: bool = False, tiling: Tiling
) -> None:
    """out [1, rows] = x [1, width] @ weight.T (+ bias) of bfloat16, for groups of 16 or 32 columns; gated as in
    few.py."""
    tiles = tiling.blocks * 8 // weight.coding.groups
    _quant_gemv[(triton.cdiv(out.shape[1], 16 * tiling.tiles // (2 if gated else 1)),)](
        x,
        *arrays(weight),
        weight.scales if bias is None else bias,
        out,
        weight.rows,
        weight.tiles,
        weight.width,
        BASE,
        **facts(weight),
        GATED=gated,
        BIAS=bias is not None,
        W=tiling.warps,
        S=tiling.blocks,
        R=tiling.tiles,
        AHEAD=tiling.ahead,
        EVEN=weight.width % (64 * tiling.warps * tiles) == 0,
        INTERPRET=not x.is_cuda,
        **options(tiling.warps, 1),
    )
