"""GEMM of up to 16 rows with a quantized matrix, at the speed the matrix can be read.

A program takes 16 * R rows of the matrix; its W warps share their columns. The matrix takes the long side of the
tensor cores, the few rows the short one. Codes enter the product as they are: the sum of a group of columns is then
scaled, and the minimum times the sum of the rows' values is added, both in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.gemm_config import Epilogue, GemmConfig
from penstock.backend.cuda.kernels.interpreter import dot
from penstock.backend.cuda.kernels.mma_fragments import (
    affine_of,
    axis,
    codes_of,
    format_of,
    halves,
    load_tiles,
    matrix_of,
)
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.pack_quantized import QuantizedWeight


class Tiling(NamedTuple):
    """Says how a product is tiled: each program takes `tiles` times 16 rows of the matrix."""

    warps: int
    steps: int  # tiles of a row that a warp takes at a time
    tiles: int  # 16 rows each, per program
    stages: int = 1


DEFAULT = Tiling(8, 2, 1)


@triton.jit
def load_rows(x, stride, column, count, width, TILING: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Returns the rows as the tensor cores read them: words of [t, g, W, G, column / 8, (c, side)]. Where 4 columns are
    enough, every other one is a row: a lane then scales at most one."""
    W: tl.constexpr = TILING.warps
    G: tl.constexpr = TILING.steps
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
    factor = tl.permute(factor, [3, 5, 2, 4, 6, 1, 0])
    if COLUMNS == 4:
        return tl.reshape(factor, [BATCH, M, 4])
    else:
        factor = tl.reshape(factor, [BATCH, M, 1, 4, 1])
        return tl.reshape(tl.broadcast_to(factor, [BATCH, M, COLUMNS // 8, 4, 2]), [BATCH, M, COLUMNS])


@triton.jit
def used(product, BATCH: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns a product without the columns between, where there are only 4 rows."""
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
    affine,
    GROUPS: tl.constexpr,
    ADDED: tl.constexpr,
    TILING: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds a product to `total`, for groups of 32 columns or more, GROUPS in a tile."""
    W: tl.constexpr = TILING.warps
    G: tl.constexpr = TILING.steps
    R: tl.constexpr = TILING.tiles
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
    product = used(dot(a, b), BATCH, M, COLUMNS)
    total += product * spread(affine[0], BATCH, M, COLUMNS)
    if ADDED:
        sums = used(dot(tl.full([BATCH, M, K], 1.0, tl.float32).to(tl.bfloat16), b), BATCH, M, COLUMNS)
        total += sums * spread(affine[1], BATCH, M, COLUMNS)
    return total


@triton.jit
def each_step(factor, W: tl.constexpr, G: tl.constexpr, R: tl.constexpr):
    """Splits the factors of four groups of 16 columns into even and odd steps."""
    factor = tl.reshape(factor, [4, 8, W, G, R, 2, 2, 2])
    return tl.split(tl.permute(factor, [0, 1, 2, 3, 4, 5, 7, 6]))


@triton.jit
def add_tiles(total, tiles, words, base, FORMAT: tl.constexpr, TILING: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds to `total` the product of tiles with rows. Groups of 16 columns take two products of 32, each with half of
    the rows' values."""
    W: tl.constexpr = TILING.warps
    G: tl.constexpr = TILING.steps
    R: tl.constexpr = TILING.tiles
    scale, minimum = affine_of(tiles[2], tiles[3], W, G, R, FORMAT)
    codes = codes_of(tiles[0], tiles[1], base, W, G, R, FORMAT)
    if FORMAT.groups == 4:
        even = axis(8, 5) // 2 % 2 == 0
        scales = each_step(scale, W, G, R)
        minima = each_step(minimum, W, G, R)
        first, second = tl.where(even, words, 0), tl.where(even, 0, words)
        total = add_product(total, codes, first, (scales[0], minima[0]), 2, FORMAT.added, TILING, COLUMNS)
        total = add_product(total, codes, second, (scales[1], minima[1]), 2, FORMAT.added, TILING, COLUMNS)
    else:
        total = add_product(total, codes, words, (scale, minimum), FORMAT.groups, FORMAT.added, TILING, COLUMNS)
    return total


@triton.jit
def zeros_for(FORMAT: tl.constexpr, TILING: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns sums to begin with: one for each warp, step and group, all to be added up in the end."""
    BATCH: tl.constexpr = TILING.steps * (2 if FORMAT.groups == 4 else FORMAT.groups) * TILING.warps
    return tl.zeros([BATCH, 16 * TILING.tiles, COLUMNS], tl.float32)


@triton.jit
def tile_rows(rows, R: tl.constexpr, GATED: tl.constexpr):
    """Returns which rows of tiles a program takes: R in a run, or half of them where the second half of the matrix
    begins."""
    first = tl.program_id(0)
    height = tl.cdiv(rows, 16)
    if GATED:
        row = first * (R // 2) + axis(R, 4) % (R // 2) + axis(R, 4) // (R // 2) * (height // 2)
    else:
        row = first * R + axis(R, 4)
    return tl.minimum(row, height - 1)


@triton.jit
def finish(y, bias, out, count, rows, out_stride, COLUMNS: tl.constexpr, CONFIG: tl.constexpr):
    R: tl.constexpr = CONFIG.tiling.tiles
    EPILOGUE: tl.constexpr = CONFIG.epilogue
    first = tl.program_id(0)
    item = tl.arange(0, COLUMNS)[None, :]
    if EPILOGUE.gated:
        line = first * (8 * R) + tl.arange(0, 8 * R)[:, None]
        left, right = tl.split(tl.permute(tl.reshape(y, [2, 8 * R, COLUMNS]), [1, 2, 0]))
        if EPILOGUE.bias:
            left += tl.load(bias + line, line < rows // 2, 0.0)
            right += tl.load(bias + rows // 2 + line, line < rows // 2, 0.0)
        y = left / (1 + tl.exp(-left)) * right
        inside = (line < rows // 2) & (item < count)
    else:
        line = first * (16 * R) + tl.arange(0, 16 * R)[:, None]
        if EPILOGUE.bias:
            y += tl.load(bias + line, line < rows, 0.0)
        inside = (line < rows) & (item < count)
    tl.store(out + item.to(tl.int64) * out_stride + line, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def _quant_gemm_small(x, matrix, bias, out, count, x_stride, out_stride, CONFIG: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    FORMAT: tl.constexpr = CONFIG.format
    TILING: tl.constexpr = CONFIG.tiling
    W: tl.constexpr = TILING.warps
    G: tl.constexpr = TILING.steps
    row = tile_rows(matrix.rows, TILING.tiles, CONFIG.epilogue.gated)
    total = zeros_for(FORMAT, TILING, CONFIG.columns)
    tiles = load_tiles(matrix, row, 0, W, G, G, CONFIG.even, FORMAT)
    wait_for_previous(PDL)
    for column in range(0, matrix.tiles, W * G):
        items = load_rows(x, x_stride, column, count, matrix.width, TILING, CONFIG.columns, CONFIG.even)
        next_tiles = load_tiles(matrix, row, column + W * G, W, G, G, False, FORMAT)
        total = add_tiles(total, tiles, items, matrix.base, FORMAT, TILING, CONFIG.columns)
        tiles = next_tiles
    y = tl.sum(total, 0) * matrix.factor
    finish(y, bias, out, count, matrix.rows, out_stride, CONFIG.columns, CONFIG)


def programs_for(rows: int, tiling: Tiling, gated: bool) -> int:
    return int(triton.cdiv(rows, 16 * tiling.tiles // (2 if gated else 1)))


def quant_gemm_small(
    x: Any, weight: QuantizedWeight, bias: Any | None, out: Any, *, gated: bool = False, tiling: Tiling = DEFAULT
) -> None:
    """Computes out [T, rows] = x [T, width] @ weight.T (+ bias) for up to 16 rows of bfloat16; gated: silu of its first
    half times its second, so out is half as wide."""
    even = weight.width % (64 * tiling.warps * tiling.steps) == 0
    columns = 4 if len(x) <= 4 else 8 if len(x) <= 8 else 16
    config = GemmConfig(tiling, Epilogue(gated, bias is not None), even, format_of(weight), columns)
    grid = (programs_for(out.shape[1], tiling, gated),)
    _quant_gemm_small[grid](
        x,
        matrix_of(weight),
        weight.scales if bias is None else bias,
        out,
        len(x),
        x.stride(0),
        out.stride(0),
        CONFIG=config,
        **launch_options(tiling.warps, tiling.stages),
    )
