"""Chooses tilings of products with quantized matrices. They were found on an H200 (bench/gpu/products.py --tune); for
other GPUs, the number of programs follows from multiprocessors, and the number of stages from shared memory.
"""

from __future__ import annotations

from penstock.backend.cuda.device_properties import DeviceProperties
from penstock.backend.cuda.kernels import fp8_blocks, quant_gemm, quant_gemm_small, quant_gemv
from penstock.backend.cuda.kernels.split_k import MAX_PARTIALS
from penstock.backend.cuda.storage import COLUMNS

SMALL_GEMM_ROWS = 16  # rows up to which the matrix is read at the speed of memory
QUANT_GEMM_ROWS = 256  # rows up to which a quantized matrix's values are not written out
FP8_GEMM_ROWS = 128  # rows up to which the library is slower
TALL = 16384  # rows of a matrix that fill the device by themselves
FIXED_ROWS = 64  # whose tiling all products have where it may not depend on the number of rows

Tilings = dict[str, tuple[int, int, int]]  # key: shape; warps, steps, tiles

# Keys: kind of code, most rows of x.
SMALL_GEMM_TILINGS: dict[tuple[str, int], Tilings] = {
    ("4 bits", 4): {"tall": (4, 2, 1), "deep": (16, 2, 2), "small": (8, 4, 1), "other": (8, 2, 1)},
    ("4 bits", 8): {"tall": (4, 1, 2), "deep": (8, 2, 2), "small": (8, 2, 1), "other": (4, 4, 1)},
    ("4 bits", 16): {"tall": (4, 1, 4), "deep": (8, 2, 2), "small": (8, 1, 2), "other": (4, 2, 2)},
    ("more bits", 4): {"tall": (4, 1, 2), "deep": (16, 1, 2), "small": (8, 2, 1), "other": (8, 1, 1)},
    ("more bits", 8): {"tall": (4, 1, 2), "deep": (16, 1, 2), "small": (8, 2, 1), "other": (4, 4, 1)},
    ("more bits", 16): {"tall": (4, 1, 4), "deep": (8, 2, 2), "small": (8, 2, 2), "other": (4, 2, 2)},
    ("fp8", 4): {"tall": (4, 1, 2), "deep": (8, 4, 1), "small": (8, 4, 1), "other": (8, 2, 1)},
    ("fp8", 8): {"tall": (4, 1, 2), "deep": (16, 2, 1), "small": (8, 4, 1), "other": (8, 2, 1)},
    ("fp8", 16): {"tall": (4, 1, 4), "deep": (8, 4, 1), "small": (8, 4, 1), "other": (4, 4, 1)},
}


def shape_of(rows: int, width: int) -> str:
    if rows >= TALL:
        return "tall"
    if width > 2 * rows:
        return "deep"
    return "small" if rows <= 4096 else "other"


def small_gemm_tiling(kind: str, count: int, rows: int, width: int, gated: bool = False) -> quant_gemm_small.Tiling:
    """Returns the tiling for up to SMALL_GEMM_ROWS rows. Values stay in registers, so it suits every GPU."""
    most = 4 if count <= 4 else 8 if count <= 8 else 16
    warps, steps, tiles = SMALL_GEMM_TILINGS[kind, most][shape_of(rows, width)]
    return narrowed(quant_gemm_small.Tiling(warps, steps, max(tiles, 2) if gated else tiles), width)


def narrowed(tiling: quant_gemm_small.Tiling, width: int) -> quant_gemm_small.Tiling:
    across = 1 << (-(-width // COLUMNS) - 1).bit_length()
    steps = min(tiling.steps, max(across // tiling.warps, 1))
    return tiling._replace(warps=min(tiling.warps, across), steps=steps)


def quant_gemv_tiling(
    groups: int, rows: int, width: int, gated: bool = False, table: bool = False
) -> quant_gemv.Tiling:
    """Returns the tiling for one row and a matrix with `groups` groups in a tile. A `table` takes many registers."""
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


def quant_gemm_tiling(device: DeviceProperties, count: int, rows: int, width: int) -> quant_gemm.Tiling:
    block = max(block_of(count), 64)
    split = split_of(count, rows, width, 64, block, -(-3 * device.sm_count // 16) * 16)
    programs = -(-rows // 64) * -(-count // block) * split
    tiling = quant_gemm.Tiling(4, block, 1, split, 4, 4 if programs <= 2 * device.sm_count or block <= 64 else 3)
    return tiling._replace(stages=device.stages_that_fit(tiling.stages, gemm_stage(tiling, 2)))


def fp8_gemm_tiling(device: DeviceProperties, count: int, rows: int, width: int) -> quant_gemm.Tiling:
    block = block_of(count)
    if rows >= TALL:
        tiling = quant_gemm.Tiling(8, block, 2, 1, 8 if block > 64 else 4, 4)
    else:
        split = split_of(count, rows, width, 64, block, 2 * device.sm_count)
        steps, stages = (2, 4) if block > 64 else (4, 3)
        tiling = quant_gemm.Tiling(4, block, steps, split, 4, stages)
    return tiling._replace(stages=device.stages_that_fit(tiling.stages, gemm_stage(tiling, 1)))


def gemm_stage(tiling: quant_gemm.Tiling, itemsize: int) -> int:
    return (16 * tiling.tiles + tiling.rows) * 64 * tiling.steps * itemsize


def fp8_block_gemm_tiling(device: DeviceProperties, count: int, rows: int, width: int) -> fp8_blocks.Tiling:
    items = 16 if count <= 16 else block_of(count)
    tall = 128 if count > 128 else 64
    split = split_of(count, rows, width, tall, items, 2 * device.sm_count)
    tiling = fp8_blocks.Tiling(tall, items, split, 8 if tall == 128 else 4, 4)
    return tiling._replace(stages=device.stages_that_fit(tiling.stages, fp8_block_stage(tiling, count)))


def fp8_block_stage(tiling: fp8_blocks.Tiling, count: int) -> int:
    """Returns the bytes of one stage. Up to SMALL_GEMM_ROWS rows are not quantized: they have 16 bits."""
    return (tiling.rows + tiling.items * (2 if count <= SMALL_GEMM_ROWS else 1)) * fp8_blocks.COLUMNS


def block_of(count: int) -> int:
    return 32 if count <= 32 else 64 if count <= 64 else 128


def split_of(count: int, rows: int, width: int, tile: int, block: int, programs: int) -> int:
    """Returns a power of two: enough programs, each with enough to do, whose partial sums fit the scratch memory."""
    blocks = -(-rows // tile) * -(-count // block)
    most = max(min(programs // blocks, 8, width // 512, MAX_PARTIALS // (count * rows)), 1)
    return 1 << (most.bit_length() - 1)
