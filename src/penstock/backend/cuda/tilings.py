"""Chooses tilings of products with plain values, and of attention. They were found on an H200 (bench/cuda.py --cells
tune); for other GPUs, the number of programs follows from multiprocessors, and the number of stages from shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.backend.cuda.contexts import BLOCK
from penstock.backend.cuda.device_properties import DeviceProperties
from penstock.backend.cuda.kernels import fixed_gemm, gemv, hopper_gemm, skinny_gemm
from penstock.backend.cuda.kernels.decode_attention import FEWEST_QUERIES
from penstock.backend.cuda.kernels.hopper_attention import HopperAttentionTiling
from penstock.backend.cuda.kernels.mla_attention import MlaTiling
from penstock.backend.cuda.kernels.mla_expanded import WIDTH
from penstock.backend.cuda.kernels.split_k import MAX_SPLIT
from penstock.backend.cuda.mla_expansion import TILE_TOKENS
from penstock.backend.cuda.quantized_tilings import FIXED_ROWS, split_of

SKINNY_ROWS = 32  # rows beyond which the library's product is the faster one
SKINNY_GATED_ROWS = 64
HOPPER_GEMM_ROWS = (
    33,
    64,
)  # rows of 16 bits for which hopper_gemm.py is the fastest: where it makes the gate, or a matrix is tall
TALL = 16384  # rows of a matrix
WIDE_HEAD = 128  # dimensions of a head: beyond, shared memory and registers hold less
SHORTEST_TILE = 16  # positions: the tensor cores take no fewer


def gemv_tiling(rows: int, width: int) -> gemv.Tiling:
    lines, warps = (4, 4) if rows <= 4096 else (1, 4) if rows <= 8192 else (2, 2)
    return gemv.Tiling(lines, min(1024, 1 << (width - 1).bit_length()), warps)


def expert_gemv_tiling(itemsize: int, gated: bool) -> gemv.Tiling:
    """Returns the tiling of products with experts' matrices, one row each. A warp's lanes have 16 bytes each of a row
    of the matrix at a time: so the values of x that they need are their own, and cross no shared memory."""
    lanes = 32 * 16 // itemsize
    if itemsize == 1:  # widened values take registers
        return gemv.Tiling(2 if gated else 4, lanes, 1)
    return gemv.Tiling(1, lanes, 1) if gated else gemv.Tiling(4, 2 * lanes, 2)


def skinny_tiling(
    device: DeviceProperties, count: int, rows: int, width: int, itemsize: int, gated: bool = False
) -> skinny_gemm.Tiling | None:
    """Returns None where cuBLAS is faster. Wider values come fewer at a time: all stages share the shared memory."""
    if count > (SKINNY_GATED_ROWS if gated else SKINNY_ROWS):
        return None
    tiles = -(-rows // (128 if gated else 64))
    split = max(min(2 * device.sm_count // tiles, MAX_SPLIT, width // 512), 1)
    tiling = skinny_gemm.Tiling(64, 256 // itemsize, split, 4, 4 if count > 16 or gated else 5)
    return tiling._replace(stages=device.stages_that_fit(tiling.stages, skinny_stage(tiling, count, itemsize, gated)))


def skinny_stage(tiling: skinny_gemm.Tiling, count: int, itemsize: int, gated: bool = False) -> int:
    items = max(1 << (count - 1).bit_length(), 16)
    return (tiling.rows * (2 if gated else 1) + items) * tiling.width * itemsize


def hopper_gemm_tiling(
    device: DeviceProperties,
    count: int,
    rows: int,
    width: int,
    itemsize: int,
    gated: bool = False,
    updated: bool = False,
) -> hopper_gemm.Tiling:
    """Returns a tiling with several programs for each line of tiles of a small matrix; for a large one, two on each
    multiprocessor, or one where a program needs more than half of the shared memory. Where adapters update the product,
    a program has one line."""
    tiles = -(-rows // (hopper_gemm.HALF if gated else 2 * hopper_gemm.HALF))
    steps = hopper_gemm.steps_of(width, itemsize)
    items = hopper_gemm.items_of(count)
    stage = (2 * hopper_gemm.HALF + items) * hopper_gemm.LINE
    split = max(s for s in (1, 2, 4, 8) if s == 1 or (tiles * s <= device.sm_count and steps % s == 0))
    lines = -(-tiles // device.sm_count) if items > 64 else 2 if tiles > 4 * device.sm_count and not updated else 1
    alone = -(-tiles // lines) * split <= device.sm_count
    return hopper_gemm.Tiling(
        split, lines, min(200_000 // stage, 8) if alone else (hopper_gemm.SHARED - 256 * items) // stage
    )


def fixed_gemm_tiling(device: DeviceProperties, rows: int, width: int, itemsize: int) -> fixed_gemm.Tiling:
    """Returns the tiling for any number of rows. It is not tuned: few rows fill the device about twice, and many are
    multiplied in tiles of a fair size."""
    tall, step = 128, 128 // itemsize
    split = split_of(FIXED_ROWS, rows, width, tall, FIXED_ROWS, 2 * device.sm_count)
    stages = device.stages_that_fit(4, (tall + FIXED_ROWS) * step * itemsize)
    return fixed_gemm.Tiling(tall, FIXED_ROWS, step, split, 4, stages)


class AttentionTiling(NamedTuple):
    """Says how a program of attention goes through a context."""

    tile: int  # positions at a time
    warps: int
    stages: int


HOPPER_ATTENTION_TILINGS = {  # key: dimensions of a head; a wide mix leaves registers for fewer scores
    64: HopperAttentionTiling(128, 3),
    128: HopperAttentionTiling(128, 3),
    256: HopperAttentionTiling(64, 2),
}
HOPPER_MLA_TILINGS = {(128, 64, 128): HopperAttentionTiling(128, 2)}  # key: dimensions of a head; only this was tried
MLA_PREFILL_TILINGS = (  # the fastest first
    MlaTiling(64, 32, 8, 2),
    MlaTiling(32, 32, 8, 2),
    MlaTiling(16, 32, 4, 2),
    MlaTiling(16, 16, 4, 1),
)
MLA_DECODE_TILINGS = MlaTiling(64, 32, 8, 3), MlaTiling(32, 32, 4, 3), MlaTiling(16, 32, 4, 3), MLA_PREFILL_TILINGS[-1]


def prefill_attention_tiling(device: DeviceProperties, queries: int, dims: int, itemsize: int) -> AttentionTiling:
    tiling = AttentionTiling(64, 8, 3 if dims <= WIDE_HEAD else 2)
    return fitting(device, tiling, queries * padded(dims) * itemsize, 2 * padded(dims) * itemsize)


def hopper_attention_tiling(device: DeviceProperties, dims: int) -> HopperAttentionTiling | None:
    return HOPPER_ATTENTION_TILINGS.get(dims) if device.has_hopper_attention else None


def decode_attention_tiling(
    device: DeviceProperties, rows: int, dims: int, itemsize: int, queries: int
) -> AttentionTiling:
    """Returns the tiling for programs of `queries` pairs of token and head. Few warps lack registers for wide heads or
    many queries."""
    tiling = AttentionTiling(64, 4 if rows == 1 or dims > WIDE_HEAD or queries > FEWEST_QUERIES else 2, 2)
    return fitting(device, tiling, queries * padded(dims) * itemsize, 2 * padded(dims) * itemsize)


def shared_prefix_tiling(device: DeviceProperties, dims: int, itemsize: int, queries: int) -> AttentionTiling:
    tiling = AttentionTiling(64, 4, 3 if dims <= WIDE_HEAD and itemsize <= 2 else 2)
    return fitting(device, tiling, queries * padded(dims) * itemsize, 2 * padded(dims) * itemsize)


def segmented_attention_tiling(device: DeviceProperties, dims: int, itemsize: int, queries: int) -> AttentionTiling:
    tiling = AttentionTiling(64, 4 if dims <= WIDE_HEAD else 8, 2)
    return fitting(device, tiling, queries * padded(dims) * itemsize, 2 * padded(dims) * itemsize)


def mla_prefill_tiling(device: DeviceProperties, dims: int, itemsize: int) -> MlaTiling:
    return first_fitting(device, MLA_PREFILL_TILINGS, dims, itemsize)


def mla_decode_tiling(device: DeviceProperties, heads: int, dims: int, itemsize: int) -> MlaTiling:
    """Returns the fastest tiling of MLA with no more queries than a token has heads: more programs would read the
    same keys again from the L2 cache, which is about as fast as memory."""
    most = max(padded(heads), MLA_DECODE_TILINGS[-1].queries)
    tilings = [tiling for tiling in MLA_DECODE_TILINGS if tiling.queries <= most]
    return first_fitting(device, tilings, dims, itemsize)


def segmented_mla_tiling(device: DeviceProperties, dims: int, itemsize: int) -> MlaTiling:
    """Returns the tiling of MLA in segments: its programs keep two mixes of values in registers, so they have half
    the queries of others."""
    return first_fitting(device, MLA_PREFILL_TILINGS[1:], dims, itemsize)


def first_fitting(device: DeviceProperties, tilings: Sequence[MlaTiling], dims: int, itemsize: int) -> MlaTiling:
    """Returns the first tiling whose queries and keys fit shared memory, else the last; keys hold the values. From
    Hopper on, the compiler keeps keys of all stages there, and for Blackwell queries twice."""
    hopper, blackwell = (device.capability >= least for least in ((9, 0), (10, 0)))
    for tiling in tilings:
        positions = (tiling.stages if hopper else max(tiling.stages - 1, 1)) * tiling.positions
        lines = tiling.queries * (2 if blackwell else 1) + positions
        if itemsize > 2 or lines * dims * itemsize <= device.shared_memory:
            return tiling
    return tilings[-1]


def mla_expanded_tiling(device: DeviceProperties, nope: int, rope: int, values: int, itemsize: int) -> AttentionTiling:
    """Returns the tiling of MLA with expanded keys and values, for TILE_TOKENS tokens of a head of these dimensions. No
    other was tried."""
    query, position = padded(nope) + padded(rope), padded(nope) + padded(rope) + padded(values)
    return shrunk(device, AttentionTiling(64, 8, 3), TILE_TOKENS * query * itemsize, position * itemsize)


def hopper_mla_tiling(device: DeviceProperties, nope: int, rope: int, values: int) -> HopperAttentionTiling | None:
    return HOPPER_MLA_TILINGS.get((nope, rope, values)) if device.has_hopper_attention else None


def expand_latents_stages(device: DeviceProperties, nope: int, values: int, itemsize: int) -> int:
    return device.stages_that_fit(3, (BLOCK + padded(nope) + padded(values)) * WIDTH * itemsize)


def padded(dims: int) -> int:
    return max(1 << (dims - 1).bit_length(), 16)


def fitting(
    device: DeviceProperties, tiling: AttentionTiling, query_bytes: int, position_bytes: int
) -> AttentionTiling:
    """Returns the tiling shrunk until it fits. The estimate is cautious (queries may be in registers), so tilings that
    were measured stay as they are."""
    return tiling if device.is_tuned else shrunk(device, tiling, query_bytes, position_bytes)


def shrunk(device: DeviceProperties, tiling: AttentionTiling, query_bytes: int, position_bytes: int) -> AttentionTiling:
    while tiling.tile > SHORTEST_TILE and query_bytes + tiling.tile * position_bytes > device.shared_memory:
        tiling = tiling._replace(tile=tiling.tile // 2)
    stages = device.stages_that_fit(tiling.stages, tiling.tile * position_bytes, query_bytes)
    return tiling._replace(stages=stages)
