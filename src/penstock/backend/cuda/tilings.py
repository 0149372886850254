"""Which tiling is fastest for a product, found on an H200 (bench/cuda.py --cells tune)."""

from __future__ import annotations

from functools import lru_cache

from penstock.backend.cuda.kernels import gemv, skinny

PROGRAMS = 264  # two for each multiprocessor
MOST = 32  # rows beyond which the library's product is the faster one
MOST_GATED = 64


@lru_cache(maxsize=1024)
def gemv_tiling(rows: int, width: int) -> gemv.Tiling:
    lines, warps = (4, 4) if rows <= 4096 else (1, 4) if rows <= 8192 else (2, 2)
    return gemv.Tiling(lines, min(1024, 1 << (width - 1).bit_length()), warps)


@lru_cache(maxsize=4096)
def skinny_tiling(count: int, rows: int, width: int, itemsize: int, gated: bool = False) -> skinny.Tiling | None:
    """None: the library's product is faster. Wider values come fewer at a time: all stages share 227 kB."""
    if count > (MOST_GATED if gated else MOST):
        return None
    tiles = -(-rows // (128 if gated else 64))
    split = max(min(PROGRAMS // tiles, skinny.MAX_SPLIT, width // 512), 1)
    return skinny.Tiling(64, 256 // itemsize, split, 4, 4 if count > 16 or gated else 5)
