"""Chooses the tiling of a product; the tables were found on an H200 (bench/cuda.py --cells tune)."""

from __future__ import annotations

from functools import lru_cache

from penstock.backend.cuda.kernels import gemv, hopper_gemm, skinny_gemm
from penstock.backend.cuda.kernels.split_k import MAX_SPLIT

MULTIPROCESSORS = 132
PROGRAMS = 2 * MULTIPROCESSORS
SKINNY_ROWS = 32  # rows beyond which the library's product is the faster one
SKINNY_GATED_ROWS = 64
HOPPER_GEMM_ROWS = (
    33,
    64,
)  # rows of 16 bits for which hopper_gemm.py is the fastest: where it makes the gate, or a matrix is tall
TALL = 16384  # rows of a matrix


@lru_cache(maxsize=1024)
def gemv_tiling(rows: int, width: int) -> gemv.Tiling:
    lines, warps = (4, 4) if rows <= 4096 else (1, 4) if rows <= 8192 else (2, 2)
    return gemv.Tiling(lines, min(1024, 1 << (width - 1).bit_length()), warps)


@lru_cache(maxsize=4096)
def skinny_tiling(count: int, rows: int, width: int, itemsize: int, gated: bool = False) -> skinny_gemm.Tiling | None:
    """None: the library's product is faster. Wider values come fewer at a time: all stages share 227 kB."""
    if count > (SKINNY_GATED_ROWS if gated else SKINNY_ROWS):
        return None
    tiles = -(-rows // (128 if gated else 64))
    split = max(min(PROGRAMS // tiles, MAX_SPLIT, width // 512), 1)
    return skinny_gemm.Tiling(64, 256 // itemsize, split, 4, 4 if count > 16 or gated else 5)


@lru_cache(maxsize=4096)
def hopper_gemm_tiling(count: int, rows: int, width: int, itemsize: int, gated: bool = False) -> hopper_gemm.Tiling:
    """Several programs for each line of tiles of a small matrix; of a large one, two on each multiprocessor, or one
    where a program needs more than half of the shared memory."""
    tiles = -(-rows // (hopper_gemm.HALF if gated else 2 * hopper_gemm.HALF))
    steps = hopper_gemm.steps_of(width, itemsize)
    items = hopper_gemm.items_of(count)
    stage = (2 * hopper_gemm.HALF + items) * hopper_gemm.LINE
    split = max(s for s in (1, 2, 4, 8) if s == 1 or (tiles * s <= MULTIPROCESSORS and steps % s == 0))
    lines = -(-tiles // MULTIPROCESSORS) if items > 64 else 2 if tiles > 2 * PROGRAMS else 1
    alone = -(-tiles // lines) * split <= MULTIPROCESSORS
    return hopper_gemm.Tiling(
        split, lines, min(200_000 // stage, 8) if alone else (hopper_gemm.SHARED - 256 * items) // stage
    )
