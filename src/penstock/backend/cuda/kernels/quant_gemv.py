"""GEMV of a quantized matrix with one row: eight groups of columns side by side.

The short side of the tensor cores has room for eight rows of x. One row is put there eight times, each time with only
one of eight neighbouring groups of columns and zeros elsewhere, so that one product gives the sum of each group, in the
lane that has its scale. Every lane loads a different part of the row and of the scales. Shapes are as in
mma_fragments.py, with blocks of eight groups along axis B.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.gemm_config import Epilogue, GemmConfig
from penstock.backend.cuda.kernels.interpreter import dot
from penstock.backend.cuda.kernels.mma_fragments import (
    apart,
    axis,
    codes_of,
    float16_of,
    format_of,
    halves,
    load_codes,
    matrix_of,
    minimum_of,
    numbers_of,
)
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.quant_gemm_small import finish, tile_rows
from penstock.backend.cuda.pack_quantized import QuantizedWeight


class Tiling(NamedTuple):
    """Says how a product is tiled: each program takes `tiles` times 16 rows of the matrix."""

    warps: int
    blocks: int  # eight groups each; a warp takes this many at a time
    tiles: int  # 16 rows each, per program
    ahead: int  # times that much is loaded before it is needed: 1 or 2


@triton.jit
def load_row(x, column, width, W: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Returns group g of each block, for lanes of that g: words of [t, g, W, S, 1, (c, side)]."""
    SIZE: tl.constexpr = 64 // GROUPS
    place = column * 64 + axis(W, 2) * (S * 8 * SIZE) + axis(S, 3) * (8 * SIZE)
    place = place + axis(8, 1) * SIZE + axis(4, 0) * 2 + axis(SIZE // 8, 5) * 8
    at = (x + place).to(tl.pointer_type(tl.int32))
    return (tl.load(at) if EVEN else tl.load(at, place < width, 0)).to(tl.uint32, bitcast=True)


@triton.jit
def load_factors(matrix, row, column, SHAPE: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr):
    """Returns, from N words for each tile and g, the words of groups 2 * t and 2 * t + 1 of each block:
    [t, g, W, S, R, words]."""
    W: tl.constexpr = SHAPE[0]
    S: tl.constexpr = SHAPE[1]
    TILES: tl.constexpr = SHAPE[2]
    MINE: tl.constexpr = N * TILES // 4
    tile = column + axis(W, 2) * (S * TILES) + axis(S, 3) * TILES + axis(4, 0) * TILES // 4
    lane = axis(8, 1) * N + axis(4, 0) * MINE % N
    at = apart(matrix.scales, lane) if N == 1 else matrix.scales + lane
    at = at + row * (matrix.tiles * 8 * N) + tile * (8 * N) + axis(MINE, 5)
    return tl.load(at) if EVEN else tl.load(at, tile < matrix.tiles, 0)


@triton.jit
def load_supers(matrix, row, column, SHAPE: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr):
    """Returns the N words of each g that multiply a block's factors: [t, g, W, S, R, words]."""
    tiles = matrix.tiles
    tile = column + axis(SHAPE[0], 2) * (SHAPE[1] * SHAPE[2]) + axis(SHAPE[1], 3) * SHAPE[2] + axis(4, 0) * 0
    at = matrix.supers + row * (tl.cdiv(tiles, 4) * 8 * N) + tile // 4 * (8 * N) + axis(8, 1) * N + axis(N, 5)
    return tl.load(at) if EVEN else tl.load(at, tile < tiles, 0)


@triton.jit
def load_blocks(matrix, row, column, W: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr, FORMAT: tl.constexpr):
    TILES: tl.constexpr = 8 // FORMAT.groups
    G: tl.constexpr = S * TILES
    SHAPE: tl.constexpr = (W, S, TILES)
    words, more = load_codes(matrix, row, column, W, G, G, EVEN, FORMAT)
    factors = load_factors(matrix, row, column, SHAPE, EVEN, FORMAT.words)
    outer = factors
    if FORMAT.supers:
        EACH: tl.constexpr = 2 if FORMAT.minima else 1
        outer = load_supers(matrix, row, column, SHAPE, EVEN, EACH)
    return words, more, factors, outer


@triton.jit
def side_by_side(words, W: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr):
    """Returns each group of a block in a column of its own: [S * W, columns of x, 8]."""
    words = tl.where(axis(8, 1) == axis(8, 4), words, 0)  # [t, g, W, S, group, (c, side)]
    #           [t, g, W, S, pair, c, side, e] to [S, W | pair, side, t, c, e | g]
    b = tl.reshape(halves(words), [4, 8, W, S, 16 // GROUPS, 2, 2, 2])
    return tl.reshape(tl.permute(b, [3, 2, 4, 6, 0, 5, 7, 1]), [S * W, 512 // GROUPS, 8])


@triton.jit
def above(words, W: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr):
    """Returns each group in its column, all of them from the top: [S * W, 32, 8]."""
    if GROUPS == 4:
        words = tl.permute(tl.join(words, words & 0), [0, 1, 2, 3, 4, 6, 5])
    b = tl.reshape(halves(words), [4, 8, W, S, 2, 2, 2])
    return tl.reshape(tl.permute(b, [3, 2, 5, 0, 4, 6, 1]), [S * W, 32, 8])


@triton.jit
def spread(factor, W: tl.constexpr, S: tl.constexpr, R: tl.constexpr):
    return tl.reshape(tl.permute(factor, [3, 2, 4, 6, 1, 0, 5]), [S * W, 16 * R, 8])


@triton.jit
def affine(factors, supers, W: tl.constexpr, S: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the factor of a group's sum, and the sum of its part of the row: [S * W, 16 * R, 8]
    each."""
    EACH: tl.constexpr = 2 if FORMAT.minima else 1
    numbers = tl.reshape(numbers_of(factors, FORMAT), [4, 8, W, S, R, 2, 2, EACH])  # e, half
    if FORMAT.supers:
        numbers *= tl.reshape(float16_of(supers), [4, 8, W, S, R, 1, 2, EACH])
    if FORMAT.minima:
        scale, minimum = tl.split(numbers)
        minimum = minimum_of(minimum, scale, FORMAT)
    else:
        scale = tl.reshape(numbers, [4, 8, W, S, R, 2, 2])
        minimum = scale * -FORMAT.zero
    return spread(scale, W, S, R), spread(minimum, W, S, R)


@triton.jit
def add_blocks(total, blocks, items, base, FORMAT: tl.constexpr, TILING: tl.constexpr):
    W: tl.constexpr = TILING.warps
    S: tl.constexpr = TILING.blocks
    R: tl.constexpr = TILING.tiles
    TILES: tl.constexpr = 8 // FORMAT.groups
    scale, minimum = affine(blocks[2], blocks[3], W, S, R, FORMAT)
    codes = codes_of(blocks[0], blocks[1], base, W, S * TILES, R, FORMAT)
    #           [t, g, W, S, tile, R, pair, c, half, side, e] to [S, W | R, half, g | tile, pair, side, t, c, e]
    a = tl.reshape(codes.to(tl.bfloat16), [4, 8, W, S, TILES, R, 2, 2, 2, 2, 2])
    a = tl.reshape(tl.permute(a, [3, 2, 5, 8, 1, 4, 6, 9, 0, 7, 10]), [S * W, 16 * R, 64 * TILES])
    total += dot(a, side_by_side(items, W, S, FORMAT.groups)) * scale
    if FORMAT.added:
        ones = tl.full([S * W, 16 * R, 32], 1.0, tl.float32).to(tl.bfloat16)
        total += dot(ones, above(items, W, S, FORMAT.groups)) * minimum
    return total


@triton.jit
def _quant_gemv(x, matrix, bias, out, CONFIG: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    TILING: tl.constexpr = CONFIG.tiling
    FORMAT: tl.constexpr = CONFIG.format
    W: tl.constexpr = TILING.warps
    S: tl.constexpr = TILING.blocks
    AHEAD: tl.constexpr = TILING.ahead
    STEP: tl.constexpr = W * S * (8 // FORMAT.groups)
    row = tile_rows(matrix.rows, TILING.tiles, CONFIG.epilogue.gated)
    total = tl.zeros([S * W, 16 * TILING.tiles, 8], tl.float32)
    blocks = load_blocks(matrix, row, 0, W, S, CONFIG.even, FORMAT)
    next_blocks = blocks
    if AHEAD == 2:
        next_blocks = load_blocks(matrix, row, STEP, W, S, False, FORMAT)
    wait_for_previous(PDL)
    items = load_row(x, 0, matrix.width, W, S, FORMAT.groups, CONFIG.even)
    for column in tl.range(0, matrix.tiles, STEP, loop_unroll_factor=3 if AHEAD == 2 else 1):
        next_items = load_row(x, column + STEP, matrix.width, W, S, FORMAT.groups, False)
        last_blocks = load_blocks(matrix, row, column + AHEAD * STEP, W, S, False, FORMAT)
        total = add_blocks(total, blocks, items, matrix.base, FORMAT, TILING)
        if AHEAD == 2:
            blocks, next_blocks = next_blocks, last_blocks
        else:
            blocks = last_blocks
        items = next_items
    y = tl.expand_dims(tl.sum(tl.sum(total, 0), 1), 1)
    finish(y * matrix.factor, bias, out, 1, matrix.rows, 0, 1, CONFIG)


def quant_gemv(
    x: Any, weight: QuantizedWeight, bias: Any | None, out: Any, *, gated: bool = False, tiling: Tiling
) -> None:
    """Computes out [1, rows] = x [1, width] @ weight.T (+ bias) of bfloat16, for groups of 16 or 32 columns; gated as
    in quant_gemm_small.py."""
    tiles = tiling.blocks * 8 // weight.coding.groups
    even = weight.width % (64 * tiling.warps * tiles) == 0
    config = GemmConfig(tiling, Epilogue(gated, bias is not None), even, format_of(weight))
    grid = (triton.cdiv(out.shape[1], 16 * tiling.tiles // (2 if gated else 1)),)
    vector = weight.scales if bias is None else bias
    _quant_gemv[grid](x, matrix_of(weight), vector, out, CONFIG=config, **launch_options(tiling.warps, 1))
