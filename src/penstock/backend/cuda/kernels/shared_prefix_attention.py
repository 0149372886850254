"""Attention of the newest tokens of many rows to a prefix that all of them have: it is read once for a tile of tokens.

A split is a piece of a prefix and a tile of tokens (shared_prefixes.py). Its partial results come after those
from decode attention, which joins them with its results for the rest of each context.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.decode_attention import (
    AttentionOptions,
    DecodeConfig,
    SharedPlaces,
    attend_split,
    queries_of,
)
from penstock.backend.cuda.kernels.kv_sides import heads_of, kinds_of, paged
from penstock.backend.cuda.kernels.kv_tile import LOG2E, SplitKV, leave_split, load_split, table_of
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous


class SharedTiles(NamedTuple):
    """Holds the prefixes of tiles of tokens."""

    splits: Any  # [U, 8] as in decode attention, but the first number is a place in `tokens`
    tokens: Any  # [M]


@triton.jit
def _shared_prefix_attention(
    qkv, kv, splits, tokens, split_kv, base, scale, cap, CONFIG: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    SHAPE: tl.constexpr = CONFIG.shape
    DIMS: tl.constexpr = SHAPE.dims
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    first = tl.load(splits + split * 8)
    if first < 0:
        return
    row, begin, end, length, _, _ = load_split(splits, split)
    size = tl.load(splits + split * 8 + 7)
    query = tl.arange(0, CONFIG.queries)
    d = tl.arange(0, SHAPE.block_d)
    index = query // SHAPE.group
    head = kv_head * SHAPE.group + query % SHAPE.group
    there = index < size
    wanted = there[:, None] & (d < DIMS)[None, :]
    token = tl.load(tokens + first + index, there, 0).to(tl.int64)
    wait_for_previous(PDL)
    source = token * SHAPE.row_heads + head
    q = tl.load(qkv + source[:, None] * DIMS + d[None, :], wanted, 0.0)  # [QUERIES, BLOCK_D]
    table = table_of(kv, row)
    highest, total, mix = attend_split(q, kv, table, kv_head, begin, end, length, scale, cap, CONFIG)
    line = (base + split.to(tl.int64) * CONFIG.shared + index) * SHAPE.heads + head
    leave_split(split_kv, line, d, mix, highest, total, there, wanted, DIMS)


def shared_prefix_attention(
    qkv: Any,
    cache: Any,
    tiles: SharedTiles,
    tables: Any,
    header: Any,
    out: Any,
    split_kv: SplitKV,
    places: SharedPlaces,
    scale: float,
    scales: Any | None = None,
    soft_cap: float = 0.0,
    *,
    tiling: tuple[int, int, int],  # positions at a time, warps, stages
) -> None:
    """Attends with tiles of tokens, whose queries are rotated, and stores their results at `places`."""
    shape = heads_of(cache, qkv, out)
    tile, warps, stages = tiling
    queries = queries_of(shape.group, places.tile_tokens)
    options = AttentionOptions(0, soft_cap > 0)
    config = DecodeConfig(
        shape, options, kinds_of(cache, scales), -1, False, queries, tile, warps, 0, 1, 1, places.tile_tokens
    )
    _shared_prefix_attention[(shape.kv_heads, len(tiles.splits))](
        *(qkv, paged(cache, scales, tables, header), *tiles),
        *(split_kv, places.base, scale * LOG2E, soft_cap * LOG2E),
        CONFIG=config,
        **launch_options(warps, stages),
    )
