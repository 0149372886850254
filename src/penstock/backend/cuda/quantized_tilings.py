"""Chooses which kernel multiplies rows with a quantized matrix, and its tiling. The tables were found on an H200
(bench/gpu/products.py --tune).
"""

from __future__ import annotations

from functools import lru_cache

from penstock.backend.cuda.kernels import quant_gemm, quant_gemm_small, quant_gemv
from penstock.backend.cuda.kernels.split_k import MAX_PARTIALS
from penstock.backend.cuda.quant_blocks import COLUMNS

SMALL_GEMM_ROWS = 16  # rows up to which the matrix is read at the speed of memory
QUANT_GEMM_ROWS = 256  # rows up to which a quantized matrix's values are not written out
FP8_GEMM_ROWS = 128  # rows up to which the library is slower
TALL = 16384  # rows of a matrix that fill the device by themselves
PROGRAMS = 400  # three for each multiprocessor
PROGRAMS_FLOAT8 = 264

Tilings = dict[str, tuple[int, int, int]]  # by shape: warps, steps, tiles

# by kind of code and most rows of x
SMALL_GEMM_TILINGS: dict[tuple[str, int], Tilings] = {
    ("4 bits", 4): {"tall": (4, 2, 1), "deep": (16, 2, 2), "small": (8, 4, 1), "other": (8, 2, 1)},
    ("4 bits", 8): {"tall": (4, 1, 2), "deep": (8, 2, 2), "small": (8, 2, 1), "other": (4, 4, 1)},
    ("4 bits", 16): {"tall": (4, 1, 4), "deep": (8, 2, 2), "small": (8, 1, 2), "other": (4, 2, 2)},
    ("more bits", 4): {"tall": (4, 1, 2), "deep": (16, 1, 2), "small": (8, 2, 1), "other": (8, 1, 1)},
    ("more bits", 8): {"tall": (4, 1, 2), "deep": (16, 1, 2), "small": (8, 2, 1), "other": (4, 4, 1)},
    ("more bits", 16): {"tall": (4, 1, 4), "deep": (8, 2, 2), "small": (8, 2, 2), "other": (4, 2, 2)},
    ("float8", 4): {"tall": (4, 1, 2), "deep": (8, 4, 1), "small": (8, 4, 1), "other": (8, 2, 1)},
    ("float8", 8): {"tall": (4, 1, 2), "deep": (16, 2, 1), "small": (8, 4, 1), "other": (8, 2, 1)},
    ("float8", 16): {"tall": (4, 1, 4), "deep": (8, 4, 1), "small": (8, 4, 1), "other": (4, 4, 1)},
}


def shape_of(rows: int, width: int) -> str:
    if rows >= TALL:
        return "tall"
    if width > 2 * rows:
        return "deep"
    return "small" if rows <= 4096 else "other"


@lru_cache(maxsize=4096)
def small_gemm_tiling(kind: str, count: int, rows: int, width: int, gated: bool = False) -> quant_gemm_small.Tiling:
    most = 4 if count <= 4 else 8 if count <= 8 else 16
    warps, steps, tiles = SMALL_GEMM_TILINGS[kind, most][shape_of(rows, width)]
    across = 1 << (-(-width // COLUMNS) - 1).bit_length()  # tiles of a narrow matrix
    steps = min(steps, max(across // warps, 1))
    return quant_gemm_small.Tiling(min(warps, across), steps, max(tiles, 2) if gated else tiles)


@lru_cache(maxsize=4096)
def quant_gemv_tiling(
    groups: int, rows: int, width: int, gated: bool = False, table: bool = False
) -> quant_gemv.Tiling:
    """Returns the tiling for one row of x and a matrix of so many groups in a tile. `table`: its values come from a
    table, which takes many registers."""
    across = -(-width * groups // (8 * COLUMNS))  # blocks
    if gated or (rows >= TALL and groups < 4):
        warps, blocks, tiles, ahead = 2 if rows >= TALL else 8, 1, 2, 1
    elif rows >= TALL:
        warps, blocks, tiles, ahead = 2, 2, 1, 1
    elif shape_of(rows, width) == "deep":
        warps, blocks, tiles, ahead = 8, 1, 1, 2
    else:
        warps, blocks, tiles, ahead = 8 if rows <= 4096 else 4, 2, 1, 1
    warps = min(warps, 1 << (across - 1).bit_length())
    return quant_gemv.Tiling(warps, 1 if table else blocks, tiles, ahead)


@lru_cache(maxsize=4096)
def quant_gemm_tiling(count: int, rows: int, width: int) -> quant_gemm.Tiling:
    block = max(block_of(count), 64)
    split = split_of(count, rows, width, 64, block, PROGRAMS)
    programs = -(-rows // 64) * -(-count // block) * split
    return quant_gemm.Tiling(4, block, 1, split, 4, 4 if programs <= 264 or block <= 64 else 3)


@lru_cache(maxsize=4096)
def fp8_gemm_tiling(count: int, rows: int, width: int) -> quant_gemm.Tiling:
    block = block_of(count)
    if rows >= TALL:
        return quant_gemm.Tiling(8, block, 2, 1, 8 if block > 64 else 4, 4)
    split = split_of(count, rows, width, 64, block, PROGRAMS_FLOAT8)
    return quant_gemm.Tiling(4, block, 2, split, 4, 4) if block > 64 else quant_gemm.Tiling(4, block, 4, split, 4, 3)


def block_of(count: int) -> int:
    return 32 if count <= 32 else 64 if count <= 64 else 128


def split_of(count: int, rows: int, width: int, tile: int, block: int, programs: int) -> int:
    """A power of two: enough programs, each with enough to do, that leave each other no more than there is room for."""
    blocks = -(-rows // tile) * -(-count // block)
    most = max(min(programs // blocks, 8, width // 512, MAX_PARTIALS // (count * rows)), 1)
    return 1 << (most.bit_length() - 1)
