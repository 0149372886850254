"""Attention of runs of tokens over a paged context.

A tile is a run of tokens of one row; a program attends with all query heads of one KV head for every token of a tile,
so its rows are pairs of token and head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.decode_attention import AttentionOptions, sink_of, temperature_of, with_gain
from penstock.backend.cuda.kernels.hopper_attention import HopperAttentionTiling, has_all_of, hopper_attention
from penstock.backend.cuda.kernels.kv_sides import (
    INT4,
    KvKinds,
    heads_of,
    is_apart,
    key_side,
    kinds_of,
    load_lines,
    paged,
    value_side,
)
from penstock.backend.cuda.kernels.kv_tile import (
    LOG2E,
    KvShape,
    line_of,
    load_blocks,
    no_scores,
    soft_capped,
    soften,
    store_mix,
    table_of,
)
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous

QUERIES = 128  # pairs of token and head in a tile


def tokens_per_tile(group: int) -> int:
    return max(QUERIES // group, 1)


def queries_per_tile(shared: int) -> int:
    return max(QUERIES, int(triton.next_power_of_2(shared)))


@triton.jit
def load_tile(kv, tiles, tile):
    """Returns where the block table of a tile's row begins, the tile's first position, and how many tokens it has."""
    table = table_of(kv, tl.load(tiles + tile * 5 + 1))
    return table, tl.load(tiles + tile * 5 + 2), tl.load(tiles + tile * 5 + 3)


class PrefillConfig(NamedTuple):
    """Holds the constants of a launch."""

    shape: KvShape
    options: AttentionOptions
    kinds: KvKinds
    queries: int
    tile: int
    reach: int = 0  # above 0: scores get a bias by distance, the same for all beyond it


@triton.jit
def bias_of(biases, head, distance, REACH: tl.constexpr):
    """Returns the biases [QUERIES, TILE] of keys at these distances before (below 0) or after their query."""
    nearest = tl.minimum(tl.maximum(distance, -REACH), REACH) + REACH
    return tl.load(biases + head[:, None] * (2 * REACH + 1) + nearest) * 1.4426950408889634


@triton.jit
def _fold(q, keys, values, scales, visible, bias, scale, cap, softmax, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    highest, total, mix = softmax
    score = tl.dot(q, tl.trans(keys).to(q.dtype), input_precision="ieee") * scale
    if CONFIG.kinds.keys > INT4:
        score *= scales[0][None, :]
    if CONFIG.options.capped:
        score = soft_capped(score, cap)
    if CONFIG.reach:
        score += bias
    if MASKED:
        score = tl.where(visible, score, -float("inf"))
    peak, weight, shrink, total = soften(score, highest, total)
    if CONFIG.kinds.values > INT4:
        weight *= scales[1][None, :]
    mix = tl.dot(weight.to(q.dtype), values.to(q.dtype), mix * shrink[:, None], input_precision="ieee")
    return peak, total, mix


@triton.jit
def load_scales(side, line, seen, otherwise, LARGEST: tl.constexpr):
    if LARGEST > INT4:
        return tl.load(side[1] + line) if seen is None else tl.load(side[1] + line, seen, 0.0)
    else:
        return otherwise


@triton.jit
def load_kv(kv, line, d, scale, inside, seen, CONFIG: tl.constexpr):
    SHAPE: tl.constexpr = CONFIG.shape
    KINDS: tl.constexpr = CONFIG.kinds
    key_lines, value_lines = key_side(kv, SHAPE, KINDS), value_side(kv, SHAPE, KINDS)
    keys = load_lines(key_lines, line, d, inside, SHAPE, KINDS.keys)  # [TILE, BLOCK_D]
    values = load_lines(value_lines, line, d, inside, SHAPE, KINDS.values)
    key_scales = load_scales(key_lines, line, seen, scale, KINDS.keys)
    return keys, values, (key_scales, load_scales(value_lines, line, seen, scale, KINDS.values))


@triton.jit
def _prefill_attention(qkv, kv, tiles, out, sinks, q_gain, biases, scale, cap, CONFIG: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    OPTIONS: tl.constexpr = CONFIG.options
    SHAPE: tl.constexpr = CONFIG.shape
    TILE: tl.constexpr = CONFIG.tile
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    wait_for_previous(PDL)
    token = tl.load(tiles + tile * 5).to(tl.int64)
    if token < 0:
        return
    table, first, count = load_tile(kv, tiles, tile)

    pair = tl.arange(0, CONFIG.queries)
    d = tl.arange(0, SHAPE.block_d)
    index = pair // SHAPE.group
    wanted = (index < count)[:, None] & (d < SHAPE.dims)[None, :]
    own = first + index  # position of each query
    head = kv_head * SHAPE.group + pair % SHAPE.group
    row = (token + index) * SHAPE.row_heads + head
    q = tl.load(qkv + row[:, None] * SHAPE.dims + d[None, :], wanted, 0.0)  # [CONFIG.queries, BLOCK_D]
    if OPTIONS.q_gain:
        q = with_gain(q, q_gain, d, SHAPE.dims)
    if OPTIONS.temperature > 0:
        scale = (scale * temperature_of(own + 1, OPTIONS))[:, None]

    softmax = no_scores(CONFIG.queries, SHAPE.block_d)
    begin = 0
    end = first + count
    if not OPTIONS.causal:
        end = tl.load(tiles + tile * 5 + 4)
        whole = end // TILE * TILE
        if OPTIONS.window:
            begin = tl.maximum(first - OPTIONS.window + 1, 0) // TILE * TILE
            end = tl.minimum(end, first + count + OPTIONS.window - 1)
            whole = begin
    elif OPTIONS.window:
        begin = tl.maximum(first - OPTIONS.window + 1, 0) // TILE * TILE
        whole = begin
    elif OPTIONS.chunk:
        begin = first // OPTIONS.chunk * OPTIONS.chunk // TILE * TILE
        whole = begin
    else:
        whole = (first + 1) // TILE * TILE  # up to here every query sees everything
    block = load_blocks(table, begin + tl.arange(0, TILE), end, SHAPE.block_size)
    for start in tl.range(begin, whole, TILE):
        position = start + tl.arange(0, TILE)
        line = line_of(block, position, kv_head, SHAPE)
        block = load_blocks(table, position + TILE, end, SHAPE.block_size)
        keys, values, scales = load_kv(kv, line, d, scale, (d < SHAPE.dims)[None, :], None, CONFIG)
        bias = bias_of(biases, head, position[None, :] - own[:, None], CONFIG.reach) if CONFIG.reach else scale
        softmax = _fold(q, keys, values, scales, True, bias, scale, cap, softmax, False, CONFIG)
    for start in tl.range(whole, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < end
        if OPTIONS.window:
            seen = seen & (position > first - OPTIONS.window)  # tables name any block at all before that
        if OPTIONS.chunk:
            seen = seen & (position >= first // OPTIONS.chunk * OPTIONS.chunk)
        line = line_of(block, position, kv_head, SHAPE)
        block = load_blocks(table, position + TILE, end, SHAPE.block_size)
        inside = seen[:, None] & (d < SHAPE.dims)[None, :]
        keys, values, scales = load_kv(kv, line, d, scale, inside, seen, CONFIG)
        distance = own[:, None] - position[None, :]
        visible = distance >= 0
        if not OPTIONS.causal:
            visible = seen[None, :]
            if OPTIONS.window:
                visible = visible & (distance > -OPTIONS.window)
        if OPTIONS.window:
            visible = visible & (distance < OPTIONS.window)
        if OPTIONS.chunk:
            visible = visible & (position[None, :] >= (own // OPTIONS.chunk * OPTIONS.chunk)[:, None])
        bias = bias_of(biases, head, -distance, CONFIG.reach) if CONFIG.reach else scale
        softmax = _fold(q, keys, values, scales, visible, bias, scale, cap, softmax, True, CONFIG)

    highest, total, mix = softmax
    if OPTIONS.sinks:
        total += sink_of(sinks, head, True, highest)
    store_mix(out, (token + index) * SHAPE.heads + head, d, mix, total, wanted, SHAPE.dims)


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
    q_gain: Any | None = None,
    distance_bias: Any | None = None,
    *,
    chunk: int = 0,
    temperature: float = 0.0,
    temperature_span: int = 1,
    tiling: tuple[int, int, int],  # positions at a time, warps, stages
    hopper: HopperAttentionTiling | None = None,
) -> None:
    """Attends with runs of tokens: on Hopper, if `hopper` is a tiling, by its own kernel where that has all requested
    features. tiles [Q, 5]: first token (-1: none), row of tables, its position, how many tokens, how many positions
    their row has reached; header[0] is the width of tables. distance_bias is [heads, 2 * reach + 1]."""
    shape = heads_of(cache, qkv, out)
    kv = paged(cache, scales, tables, header)
    options = AttentionOptions(
        window, soft_cap > 0, sinks is not None, causal, q_gain is not None, chunk, temperature, temperature_span
    )
    if hopper and distance_bias is None and not is_apart(cache) and has_all_of(cache, qkv, shape, options):
        return hopper_attention(qkv, cache, tiles, tables, header, out, scale, window, soft_cap, sinks, tiling=hopper)
    tile, warps, stages = tiling
    reach = 0 if distance_bias is None else len(distance_bias) // shape.heads // 2
    _prefill_attention[(shape.kv_heads, len(tiles))](
        *(qkv, kv, tiles, out),
        *(tiles if vector is None else vector for vector in (sinks, q_gain, distance_bias)),
        *(scale * LOG2E, soft_cap * LOG2E),
        CONFIG=PrefillConfig(shape, options, kinds_of(cache, scales), queries_per_tile(shape.group), tile, reach),
        **launch_options(warps, 1 if reach else stages),  # biases that are loaded ahead take much shared memory
    )
