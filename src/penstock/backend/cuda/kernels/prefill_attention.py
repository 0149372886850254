"""Attention of runs of tokens over a paged context.

A tile is a run of tokens of one row; a program attends with all query heads of one KV head for every token of a tile,
so its rows are pairs of token and head.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.decode_attention import LOG2E, blocks_of, sink_of, soft_capped
from penstock.backend.cuda.kernels.kv8 import scaling
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options

QUERIES = 128  # pairs of token and head in a tile
TILING = 64, 8, 3  # positions at a time, warps, stages


def tokens_per_tile(shared: int) -> int:
    """How many tokens a tile holds when so many query heads share a KV head."""
    return max(QUERIES // shared, 1)


def queries_per_tile(shared: int) -> int:
    """Returns how many pairs of token and head a tile has room for when so many query heads share a KV head."""
    return max(QUERIES, int(triton.next_power_of_2(shared)))


@triton.jit
def _fold(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    score_mask,
    scale,
    cap,
    highest,
    total,
    mix,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Takes a tile of keys and values into the running softmax."""
    score = tl.dot(q, tl.trans(keys).to(q.dtype), input_precision="ieee") * scale
    if SCALED:
        score *= key_scales[None, :]
    if CAPPED:
        score = soft_capped(score, cap)
    if MASKED:
        score = tl.where(score_mask, score, -float("inf"))
    peak = tl.maximum(highest, tl.max(score, 1))
    weight = tl.exp2(score - peak[:, None])
    shrink = tl.exp2(highest - peak)
    total = total * shrink + tl.sum(weight, 1)
    if SCALED:
        weight *= value_scales[None, :]
    mix = tl.dot(weight.to(q.dtype), values.to(q.dtype), mix * shrink[:, None], input_precision="ieee")
    return peak, total, mix


@triton.jit
def _prefill_attention(
    qkv,
    cache,
    scales,
    tiles,
    tables,
    header,
    out,
    sinks,
    scale,
    cap,
    SUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    if PDL:
        gdc_wait()
    token = tl.load(tiles + tile * 5).to(tl.int64)
    if token < 0:
        return
    table = tables + tl.load(tiles + tile * 5 + 1).to(tl.int64) * tl.load(header)
    first = tl.load(tiles + tile * 5 + 2)
    count = tl.load(tiles + tile * 5 + 3)

    pair = tl.arange(0, QUERIES)
    d = tl.arange(0, BLOCK_D)
    index = pair // SHARED
    wanted = (index < count)[:, None] & (d < DIMS)[None, :]
    own = first + index  # position of each query
    head = kv_head * SHARED + pair % SHARED
    row = (token + index) * ((SHARED + 2) * KV_HEADS) + head
    q = tl.load(qkv + row[:, None] * DIMS + d[None, :], wanted, 0.0)  # [QUERIES, BLOCK_D]

    highest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mix = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    begin = 0
    end = first + count
    if not CAUSAL:
        end = tl.load(tiles + tile * 5 + 4)
        whole = end // TILE * TILE
    elif WINDOW:
        begin = tl.maximum(first - WINDOW + 1, 0) // TILE * TILE
        whole = begin
    else:
        whole = (first + 1) // TILE * TILE  # up to here every query sees everything
    block = blocks_of(table, begin + tl.arange(0, TILE), end, BLOCK_SIZE)
    for start in tl.range(begin, whole, TILE):
        position = start + tl.arange(0, TILE)
        line = (block * (2 * KV_HEADS) + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
        block = blocks_of(table, position + TILE, end, BLOCK_SIZE)
        at = cache + line[:, None] * DIMS + d[None, :]
        keys = tl.load(at, (d < DIMS)[None, :], 0.0)  # [TILE, BLOCK_D]
        values = tl.load(at + KV_HEADS * BLOCK_SIZE * DIMS, (d < DIMS)[None, :], 0.0)
        key_scales, value_scales = scale, scale
        if SCALED:
            key_scales = tl.load(scales + line)
            value_scales = tl.load(scales + line + KV_HEADS * BLOCK_SIZE)
        highest, total, mix = _fold(
            q,
            keys,
            values,
            key_scales,
            value_scales,
            True,
            scale,
            cap,
            highest,
            total,
            mix,
            CAPPED=CAPPED,
            MASKED=False,
            SCALED=SCALED,
        )
    for start in tl.range(whole, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < end
        if WINDOW:
            seen = seen & (position > first - WINDOW)  # tables name any block at all before that
        line = (block * (2 * KV_HEADS) + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
        block = blocks_of(table, position + TILE, end, BLOCK_SIZE)
        inside = seen[:, None] & (d < DIMS)[None, :]
        at = cache + line[:, None] * DIMS + d[None, :]
        keys = tl.load(at, inside, 0.0)
        values = tl.load(at + KV_HEADS * BLOCK_SIZE * DIMS, inside, 0.0)
        key_scales, value_scales = scale, scale
        if SCALED:
            key_scales = tl.load(scales + line, seen, 0.0)
            value_scales = tl.load(scales + line + KV_HEADS * BLOCK_SIZE, seen, 0.0)
        distance = own[:, None] - position[None, :]
        visible = distance >= 0
        if not CAUSAL:
            visible = seen[None, :]
        elif WINDOW:
            visible = visible & (distance < WINDOW)
        highest, total, mix = _fold(
            q,
            keys,
            values,
            key_scales,
            value_scales,
            visible,
            scale,
            cap,
            highest,
            total,
            mix,
            CAPPED=CAPPED,
            MASKED=True,
            SCALED=SCALED,
        )

    if SUNK:
        total += sink_of(sinks, head, True, highest)
    target = out + ((token + index) * (SHARED * KV_HEADS) + head)[:, None] * DIMS + d[None, :]
    tl.store(target, (mix / total[:, None]).to(out.dtype.element_ty), wanted)


def prefill_attention(
    qkv: Any,
    cache: Any,
    tiles: Any,
    tables: Any,
    header: Any,
    out: Any,
    scale: float,
    window: int,
    scales: Any | None = None,
    soft_cap: float = 0.0,
    causal: bool = True,
    sinks: Any | None = None,
    tiling: tuple[int, int, int] = TILING,
) -> None:
    """tiles [Q, 5]: first token (-1: none), row of tables, its position, how many tokens, how many positions their row
    has reached; header[0] is the width of tables."""
    kv_heads, block_size, dims = cache.shape[2:]
    shared = out.shape[1] // dims // kv_heads
    tile, warps, stages = tiling
    _prefill_attention[(kv_heads, len(tiles))](
        qkv,
        cache,
        tiles if scales is None else scales,
        tiles,
        tables,
        header,
        out,
        tiles if sinks is None else sinks,
        scale * LOG2E,
        soft_cap * LOG2E,
        SUNK=sinks is not None,
        CAPPED=soft_cap > 0,
        WINDOW=window,
        CAUSAL=causal,
        KV_HEADS=kv_heads,
        SHARED=shared,
        DIMS=dims,
        BLOCK_SIZE=block_size,
        QUERIES=queries_per_tile(shared),
        BLOCK_D=max(triton.next_power_of_2(dims), 16),
        TILE=tile,
        **scaling(cache, scales),
        **options(warps, stages),
    )
