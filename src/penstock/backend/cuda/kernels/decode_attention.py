"""Attention of the newest tokens over long contexts, which are split into parts that run at once (split-KV).

A program attends with all query heads of one KV head to one split, for one token or, where drafts are verified, for a
run of a row's newest tokens: each key is then read once for all of them. Splits are planned on the host (inputs.py) and
read from device memory, so the grid of a captured graph does not depend on lengths. The last split of a context stores
its newest key and value in the cache, unless there are runs. The last program to finish joins all results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.decode_attention_kv8 import QUERIES, attend_kv8, key_order, value_order
from penstock.backend.cuda.kernels.kv8 import quantize_kv, scale_of
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
    SplitKV,
    first_seen,
    leave_split,
    line_of,
    load_blocks,
    load_split,
    no_scores,
    sees,
    soft_capped,
    soften,
    store_mix,
    table_of,
)
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.rope import rotation_of

__all__ = ["AttentionOptions", "Rotation", "SharedPlaces", "SplitKV", "decode_attention", "sink_of"]

KV8 = 2, 2  # warps, groups of 16 positions for each at a time: over 8 bits
KV8_RUN = 4, 1  # the same with twice the queries, which take a group's registers
FEWEST_QUERIES = 16  # minimum of tensor cores
MOST_JOINED = 16  # splits that a program joins at a time
JOINED = 128  # values of splits that a thread joins at a time: with more it spills registers


class AttentionOptions(NamedTuple):
    """Lists the options of a layer's attention beyond the plain softmax."""

    window: int = 0  # 0: all positions are seen
    capped: bool = False  # scores have a soft cap
    sinks: bool = False  # each head has a logit that takes part in the softmax and gives nothing
    causal: bool = True
    q_gain: bool = False  # rotated queries are multiplied by a vector as wide as a head
    chunk: int = 0  # above 0: a token sees only its own chunk of this many positions
    temperature: float = 0.0  # see `temperature_of`
    temperature_span: int = 1


class Rotation(NamedTuple):
    """RoPE for queries and the newest keys, which then go to `places` [T] in the cache."""

    inv_freq: Any  # [pairs] float64
    places: Any
    scale: float
    rotated: int  # pairs of each head
    interleaved: bool


class SharedPlaces(NamedTuple):
    """Says where partial results are of prefixes to which tokens have attended together."""

    places: Any  # [T, 4] see `shared_places`
    base: int  # lines of SplitKV before the first of them
    tile_tokens: int  # lines of each split


class DecodeConfig(NamedTuple):
    """Holds the constants of a launch. A split is computed by tiles of positions, or in groups of 16 over an 8-bit
    cache."""

    shape: KvShape
    options: AttentionOptions
    kinds: KvKinds
    rotated: int  # pairs of each head; -1: queries are rotated already
    interleaved: bool
    queries: int
    tile: int
    warps: int
    groups: int  # 0: by tiles
    run: int  # tokens of a row that attend together, at most
    joined: int  # splits that are joined at a time
    shared: int = 0  # tokens that attend together to a prefix, at most; 0: none do


@triton.jit
def with_gain(q, q_gain, d, DIMS: tl.constexpr):
    return (q.to(tl.float32) * tl.load(q_gain + d, d < DIMS, 0.0)[None, :]).to(q.dtype)


@triton.jit
def temperature_of(length, OPTIONS: tl.constexpr):
    """Returns the temperature of queries that see `length` positions, including their own."""
    return 1.0 + OPTIONS.temperature * tl.log((length // OPTIONS.temperature_span + 1).to(tl.float32))


@triton.jit
def sink_of(sinks, head, there, highest):
    """Returns the weight of a head's sink, which is added once, after all splits."""
    return tl.exp2(tl.load(sinks + head, there, 0.0) * 1.4426950408889634 - highest)


@triton.jit
def store_newest(source, kv, place_at, kv_head, d, rotation, SHAPE: tl.constexpr, LARGEST: tl.constexpr):
    """Rotates a token's key and stores it and its value in the cache; `rotation` is (cos, sin, other)."""
    cos, sin, other = rotation
    DIMS: tl.constexpr = SHAPE.dims
    key = tl.load(source + d, d < DIMS, 0.0).to(tl.float32) * cos
    key += tl.load(source + other, d < DIMS, 0.0).to(tl.float32) * sin
    value = tl.load(source + SHAPE.kv_heads * DIMS + d, d < DIMS, 0.0)
    place = tl.load(place_at).to(tl.int64)
    line = line_of(place // SHAPE.block_size, place, kv_head, SHAPE)
    target = kv.lines + line * DIMS + d
    key = key.to(source.dtype.element_ty)
    DTYPE: tl.constexpr = kv.lines.dtype.element_ty
    if LARGEST > 0:
        key, value = key.to(tl.float32), value.to(tl.float32)
        key_scale = scale_of(tl.max(tl.abs(key), 0), LARGEST)
        value_scale = scale_of(tl.max(tl.abs(value), 0), LARGEST)
        tl.store(kv.scales + line, key_scale)
        tl.store(kv.scales + line + SHAPE.apart, value_scale)
        key = quantize_kv(key, key_scale, DTYPE)
        value = quantize_kv(value, value_scale, DTYPE)
    tl.store(target, key.to(DTYPE), d < DIMS)
    tl.store(target + SHAPE.apart * DIMS, value.to(DTYPE), d < DIMS)


@triton.jit
def attend_split(q, kv, table, kv_head, begin, end, lengths, scale, cap, CONFIG: tl.constexpr):
    """Attends from `begin` to `end`; returns the highest score, the sum of weights, and the mix of values. Of
    a run, each query sees what the newest of its `lengths` positions does."""
    SHAPE: tl.constexpr = CONFIG.shape
    OPTIONS: tl.constexpr = CONFIG.options
    DIMS: tl.constexpr = SHAPE.dims
    TILE: tl.constexpr = CONFIG.tile
    KINDS: tl.constexpr = CONFIG.kinds
    d = tl.arange(0, SHAPE.block_d)
    key_lines, value_lines = key_side(kv, SHAPE, KINDS), value_side(kv, SHAPE, KINDS)
    if CONFIG.run > 1:
        lengths = lengths[:, None]
        if OPTIONS.temperature > 0:
            scale = scale[:, None]
    highest, total, mix = no_scores(CONFIG.queries, SHAPE.block_d)
    block = load_blocks(table, begin + tl.arange(0, TILE), end, SHAPE.block_size)
    for start in tl.range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < end
        line = line_of(block, position, kv_head, SHAPE)
        block = load_blocks(table, position + TILE, end, SHAPE.block_size)
        inside = seen[:, None] & (d < DIMS)[None, :]
        keys = load_lines(key_lines, line, d, inside, SHAPE, KINDS.keys)  # [TILE, BLOCK_D]
        score = tl.dot(q, tl.trans(keys).to(q.dtype), input_precision="ieee") * scale
        if KINDS.keys > INT4:
            score *= tl.load(key_lines[1] + line, seen, 0.0)[None, :]
        if OPTIONS.capped:
            score = soft_capped(score, cap)
        visible = seen[None, :]
        if CONFIG.run > 1:
            visible = visible & sees(position[None, :], lengths, OPTIONS)
        score = tl.where(visible, score, -float("inf"))
        highest, weight, shrink, total = soften(score, highest, total)
        values = load_lines(value_lines, line, d, inside, SHAPE, KINDS.values).to(q.dtype)
        if KINDS.values > INT4:
            weight *= tl.load(value_lines[1] + line, seen, 0.0)[None, :]
        mix = tl.dot(weight.to(q.dtype), values, mix * shrink[:, None], input_precision="ieee")
    return highest, total, mix


@triton.jit
def attend_by_kind(q, kv, table, kv_head, begin, end, lengths, scale, cap, CONFIG: tl.constexpr):
    if CONFIG.groups:
        return attend_kv8(q, kv, table, kv_head, begin, end, lengths, scale, CONFIG)
    else:
        return attend_split(q, kv, table, kv_head, begin, end, lengths, scale, cap, CONFIG)


@triton.jit
def load_run(splits, split, length, query, CONFIG: tl.constexpr):
    """Returns how many tokens attend, which of them each query is of, and how many positions that one sees."""
    if CONFIG.run == 1:
        return 1, 0, length
    else:
        tokens, index = tl.load(splits + split * 8 + 7), query // CONFIG.shape.group
        return tokens, index, length - tokens + 1 + index


@triton.jit
def with_shared(softmax, shared, token, chosen, head, d, there, split_kv, CONFIG: tl.constexpr):
    """Merges the result for a shared prefix into the running softmax of a token, if this split is `chosen` for it."""
    highest, total, mix = softmax
    places, base = shared
    SHAPE: tl.constexpr = CONFIG.shape
    DIMS: tl.constexpr = SHAPE.dims
    first = tl.load(places + token * 4).to(tl.int64)
    count = tl.where(chosen, tl.load(places + token * 4 + 1), 0)
    place = tl.load(places + token * 4 + 2)
    inside = there[:, None] & (d < DIMS)[None, :]
    for split in tl.range(0, count):
        line = (base + (first + split) * CONFIG.shared + place) * SHAPE.heads + head
        peaks = tl.load(split_kv.stats + line * 2, there, -1e30, cache_modifier=".cg")
        totals = tl.load(split_kv.stats + line * 2 + 1, there, 0.0, cache_modifier=".cg")
        mixes = tl.load(split_kv.outputs + line[:, None] * DIMS + d[None, :], inside, 0.0, cache_modifier=".cg")
        peak = tl.maximum(highest, peaks)
        shrink, factor = tl.exp2(highest - peak), tl.exp2(peaks - peak)
        total = total * shrink + totals * factor
        mix = mix * shrink[:, None] + mixes * factor[:, None]
        highest = peak
    return highest, total, mix


@triton.jit
def _decode_attention(
    qkv, kv, splits, out, split_kv, rotation, sinks, q_gain, shared, scale, cap, CONFIG: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    SHAPE: tl.constexpr = CONFIG.shape
    OPTIONS: tl.constexpr = CONFIG.options
    ROTATED: tl.constexpr = CONFIG.rotated
    DIMS: tl.constexpr = SHAPE.dims
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    token = tl.load(splits + split * 8).to(tl.int64)
    if token < 0:
        return
    row, begin, end, length, count, first = load_split(splits, split)
    table = table_of(kv, row)
    query = tl.arange(0, CONFIG.queries)
    tokens, index, lengths = load_run(splits, split, length, query, CONFIG)
    begin = first_seen(begin, length - tokens + 1, OPTIONS)
    if OPTIONS.temperature > 0:
        scale *= temperature_of(lengths, OPTIONS)  # [QUERIES] of a run

    kept = tl.arange(0, SHAPE.block_d)  # the dimensions of the result
    d = kept
    if CONFIG.groups:
        d, kept = key_order(d), value_order(d, DIMS)
    head = kv_head * SHAPE.group + query - index * SHAPE.group
    there = query < tokens * SHAPE.group
    wanted = there[:, None] & (d < DIMS)[None, :]
    source = (token + index) * SHAPE.row_heads + head
    if ROTATED >= 0:
        cos, sin, other = rotation_of(rotation[0], length - 1, rotation[2], d, ROTATED, CONFIG.interleaved, DIMS)
    wait_for_previous(PDL)
    q = tl.load(qkv + source[:, None] * DIMS + d[None, :], wanted, 0.0)  # [QUERIES, BLOCK_D]
    if ROTATED >= 0:
        q_other = tl.load(qkv + source[:, None] * DIMS + other[None, :], wanted, 0.0)
        q = (q.to(tl.float32) * cos[None, :] + q_other.to(tl.float32) * sin[None, :]).to(qkv.dtype.element_ty)
        STORES: tl.constexpr = SHAPE.row_heads > SHAPE.heads  # else another layer has stored this step's KV
        if STORES and end == length:
            newest = qkv + (token * SHAPE.row_heads + SHAPE.heads + kv_head) * DIMS
            store_newest(newest, kv, rotation[1] + token, kv_head, d, (cos, sin, other), SHAPE, CONFIG.kinds.keys)
        tl.debug_barrier()
    if OPTIONS.q_gain:
        q = with_gain(q, q_gain, d, DIMS)

    highest, total, mix = attend_by_kind(q, kv, table, kv_head, begin, end, lengths, scale, cap, CONFIG)
    if CONFIG.shared:
        found = highest, total, mix
        highest, total, mix = with_shared(found, shared, token, split == first, head, kept, there, split_kv, CONFIG)

    if count == 1:
        if OPTIONS.sinks:
            total += sink_of(sinks, head, there, highest)
        store_mix(out, (token + index) * SHAPE.heads + head, kept, mix, total, wanted, DIMS)
    else:
        mine = (split.to(tl.int64) * CONFIG.run + index) * SHAPE.heads + head
        leave_split(split_kv, mine, kept, mix, highest, total, there, wanted, DIMS)
        arrivals = split_kv.arrived + first * SHAPE.kv_heads + kv_head
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == count - 1:
            tl.store(arrivals, 0)
            _join(split_kv, sinks, out, token, tokens, kv_head, first, count, CONFIG)


@triton.jit
def _join(split_kv, sinks, out, token, tokens, kv_head, first, count, CONFIG: tl.constexpr):
    SHAPE: tl.constexpr = CONFIG.shape
    DIMS: tl.constexpr = SHAPE.dims
    GROUP: tl.constexpr = SHAPE.group
    QUERIES: tl.constexpr = triton.next_power_of_2(GROUP * CONFIG.run)
    SPLITS: tl.constexpr = CONFIG.joined
    d = tl.arange(0, SHAPE.block_d)
    query = tl.arange(0, QUERIES)
    index = query // GROUP
    head = kv_head * GROUP + query % GROUP
    highest, total, mix = no_scores(QUERIES, SHAPE.block_d)
    for start in tl.range(0, count, SPLITS):
        split = start + tl.arange(0, SPLITS)
        there = (split < count)[:, None] & (query < tokens * GROUP)[None, :]  # [SPLITS, QUERIES]
        line = (first + split).to(tl.int64)[:, None] * CONFIG.run + index[None, :]
        line = line * SHAPE.heads + head[None, :]
        peaks = tl.load(split_kv.stats + line * 2, there, -1e30, cache_modifier=".cg")
        totals = tl.load(split_kv.stats + line * 2 + 1, there, 0.0, cache_modifier=".cg")
        inside = there[:, :, None] & (d < DIMS)[None, None, :]
        at = split_kv.outputs + line[:, :, None] * DIMS + d[None, None, :]
        mixes = tl.load(at, inside, 0.0, cache_modifier=".cg")
        peak = tl.maximum(highest, tl.max(peaks, 0))
        factor = tl.exp2(peaks - peak[None, :])
        shrink = tl.exp2(highest - peak)
        total = total * shrink + tl.sum(totals * factor, 0)
        mix = mix * shrink[:, None] + tl.sum(mixes * factor[:, :, None], 0)
        highest = peak
    wanted = query < tokens * GROUP
    if CONFIG.options.sinks:
        total += sink_of(sinks, head, wanted, highest)
    line = (token + index) * SHAPE.heads + head
    store_mix(out, line, d, mix, total, wanted[:, None] & (d < DIMS)[None, :], DIMS)


def queries_of(group: int, run: int) -> int:
    return max(int(triton.next_power_of_2(group * run)), FEWEST_QUERIES)


def sizes_of(shape: KvShape, tile: int, warps: int, kv8: bool, run: int) -> tuple[int, int, int, int]:
    """Returns queries, tile, warps and groups of a program. Over 8 bits decode_attention_kv8.py attends where it knows
    the shape."""
    queries = shape.group * run
    if kv8 and queries <= 2 * QUERIES and shape.dims in (64, 128) and shape.block_size % 16 == 0:
        if queries <= QUERIES:
            return (QUERIES, tile, *KV8)
        if run > 1:
            return (2 * QUERIES, tile, *KV8_RUN)
    return (queries_of(shape.group, run), tile, warps, 0)


def splits_joined(shape: KvShape, run: int, warps: int) -> int:
    values = int(triton.next_power_of_2(shape.group * run)) * shape.block_d
    return min(max(JOINED * 32 * warps // values, 1), MOST_JOINED)


def decode_attention(
    qkv: Any,
    cache: Any,
    splits: Any,
    tables: Any,
    header: Any,
    out: Any,
    split_kv: SplitKV,
    rotation: Rotation | None,
    scale: float,
    window: int,
    scales: Any | None = None,
    soft_cap: float = 0.0,
    sinks: Any | None = None,
    q_gain: Any | None = None,
    *,
    chunk: int = 0,
    temperature: float = 0.0,
    temperature_span: int = 1,
    run: int = 1,
    shared: SharedPlaces | None = None,
    tiling: tuple[int, int, int],  # positions at a time, warps, stages
) -> None:
    """Attends with the newest tokens of rows, at most `run` of each context. splits [P, 8]: first token (-1: none), row
    of tables, begin, end, length of the whole context, how many splits it has, the first of them and how many tokens;
    header[0] is the width of tables. Without `rotation`, queries are rotated and keys stored already. With `shared`,
    splits begin where the prefixes end that other programs have attended to."""
    assert (run == 1 and not shared) or rotation is None, "all keys of a run are stored before it attends"
    assert not is_apart(cache) or rotation is None, "another kernel stores keys and values apart"
    shape = heads_of(cache, qkv, out)
    options = AttentionOptions(
        window, soft_cap > 0, sinks is not None, True, q_gain is not None, chunk, temperature, temperature_span
    )
    # Activations of 32 bits want more than the float16 that is used over 8 bits.
    kv8 = scales is not None and not soft_cap and qkv.element_size() == 2 and not is_apart(cache)
    tile, warps, stages = tiling
    rotated = rotation[3:] if rotation else (-1, False)
    sizes = sizes_of(shape, tile, warps, kv8, run)
    joined = splits_joined(shape, run, sizes[2])
    *places, together = shared or (splits, 0, 0)
    config = DecodeConfig(shape, options, kinds_of(cache, scales), *rotated, *sizes, run, joined, together)
    _decode_attention[(shape.kv_heads, len(splits))](
        qkv,
        paged(cache, scales, tables, header),
        splits,
        out,
        split_kv,
        rotation[:3] if rotation else (splits, splits, 1.0),
        splits if sinks is None else sinks,
        splits if q_gain is None else q_gain,
        tuple(places),
        scale * LOG2E,
        soft_cap * LOG2E,
        CONFIG=config,
        **launch_options(config.warps, stages),
    )
