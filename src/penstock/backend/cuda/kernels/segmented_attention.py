"""Attention whose sums depend only on a token's own context, not on other tokens and rows of the step. An encoder
token's context is its whole row.

A program attends with a run of a row's tokens, and all query heads of one KV head, to a whole context or to one segment
of it (segments.py). Segments begin at multiples of SEGMENT positions, tiles of positions at multiples of their size. A
query's results for its segments are joined in order, by the program itself or by the last one to finish. Prompts,
answers and drafts use the same compiled kernel with tiles of one size; products and sums are not contracted, so that
both kinds of join round alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.decode_attention import (
    AttentionOptions,
    queries_of,
    sink_of,
    temperature_of,
    with_gain,
)
from penstock.backend.cuda.kernels.kv_sides import (
    INT4,
    KvKinds,
    heads_of,
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
from penstock.backend.cuda.kernels.prefill_attention import bias_of
from penstock.backend.cuda.segments import SEGMENT


class SegmentConfig(NamedTuple):
    """Holds the constants of a launch."""

    shape: KvShape
    options: AttentionOptions
    kinds: KvKinds
    queries: int
    tile: int  # positions
    run: int  # tokens of a row that attend together, at most
    segment: int  # positions
    reach: int = 0  # above 0: scores get a bias by distance, the same for all beyond it


@triton.jit
def join(softmax, found):
    highest, total, mix = softmax
    peaks, totals, mixes = found
    peak = tl.maximum(highest, peaks)
    shrink, factor = tl.exp2(highest - peak), tl.exp2(peaks - peak)
    return peak, total * shrink + totals * factor, mix * shrink[:, None] + mixes * factor[:, None]


@triton.jit
def join_in_order(softmax, split_kv, split, place, d, there, wanted, LINES: tl.constexpr, DIMS: tl.constexpr):
    """Returns whether this program is the last of a context's, and then the results of all of them, joined in order.
    `split` is (its own number, the first of the context, how many there are, where arrivals are counted). Each has
    LINES lines of SplitKV, with queries at `place`."""
    own, first, count, arrivals = split
    last = count == 1
    if count > 1:
        highest, total, mix = softmax
        leave_split(split_kv, own.to(tl.int64) * LINES + place, d, mix, highest, total, there, wanted, DIMS)
        last = tl.atomic_add(arrivals, 1, sem="acq_rel") == count - 1
        if last:
            tl.store(arrivals, 0)
            softmax = no_scores(place.shape[0], d.shape[0])
            for other in tl.range(0, count):
                line = (first + other).to(tl.int64) * LINES + place
                peaks = tl.load(split_kv.stats + line * 2, there, -1e30, cache_modifier=".cg")
                totals = tl.load(split_kv.stats + line * 2 + 1, there, 0.0, cache_modifier=".cg")
                mixes = tl.load(split_kv.outputs + line[:, None] * DIMS + d[None, :], wanted, 0.0, cache_modifier=".cg")
                softmax = join(softmax, (peaks, totals, mixes))
    return last, softmax


@triton.jit
def attend_segment(q, kv, table, heads, begin, end, oldest, lengths, scale, cap, biases, CONFIG: tl.constexpr):
    """Attends from `begin` to `end`; returns the highest score, the sum of weights, and the mix of values. A query sees
    the same positions as the newest of its `lengths`, and later positions if attention is not causal; nothing
    is loaded from before `oldest`. `heads` are the KV head and the head of each query."""
    SHAPE: tl.constexpr = CONFIG.shape
    OPTIONS: tl.constexpr = CONFIG.options
    KINDS: tl.constexpr = CONFIG.kinds
    TILE: tl.constexpr = CONFIG.tile
    kv_head, head = heads
    key_lines, value_lines = key_side(kv, SHAPE, KINDS), value_side(kv, SHAPE, KINDS)
    d = tl.arange(0, SHAPE.block_d)
    highest, total, mix = no_scores(CONFIG.queries, SHAPE.block_d)
    block = load_blocks(table, begin + tl.arange(0, TILE), end, SHAPE.block_size)
    for start in tl.range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = (position < end) & (position >= oldest)  # tables name any block at all before that
        line = line_of(block, position, kv_head, SHAPE)
        block = load_blocks(table, position + TILE, end, SHAPE.block_size)
        inside = seen[:, None] & (d < SHAPE.dims)[None, :]
        keys = load_lines(key_lines, line, d, inside, SHAPE, KINDS.keys)  # [TILE, BLOCK_D]
        score = tl.dot(q, tl.trans(keys).to(q.dtype), input_precision="ieee") * scale
        if KINDS.keys > INT4:
            score *= tl.load(key_lines[1] + line, seen, 0.0)[None, :]
        if OPTIONS.capped:
            score = soft_capped(score, cap)
        if CONFIG.reach:
            score += bias_of(biases, head, position[None, :] - lengths[:, None] + 1, CONFIG.reach)
        visible = seen[None, :]
        if OPTIONS.causal:
            visible = visible & sees(position[None, :], lengths[:, None], OPTIONS)
        elif OPTIONS.window:
            visible = visible & (tl.abs(position[None, :] - lengths[:, None] + 1) < OPTIONS.window)
        score = tl.where(visible, score, -float("inf"))
        highest, weight, shrink, total = soften(score, highest, total)
        values = load_lines(value_lines, line, d, inside, SHAPE, KINDS.values).to(q.dtype)
        if KINDS.values > INT4:
            weight *= tl.load(value_lines[1] + line, seen, 0.0)[None, :]
        mix = tl.dot(weight.to(q.dtype), values, mix * shrink[:, None], input_precision="ieee")
    return highest, total, mix


@triton.jit
def _segmented_attention(
    qkv, kv, splits, positions, out, split_kv, vectors, scale, cap, CONFIG: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    SHAPE: tl.constexpr = CONFIG.shape
    OPTIONS: tl.constexpr = CONFIG.options
    DIMS: tl.constexpr = SHAPE.dims
    sinks, q_gain, biases = vectors
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    token = tl.load(splits + split * 8).to(tl.int64)
    if token < 0:
        return
    row, begin, end, length, count, first = load_split(splits, split)
    tokens = tl.load(splits + split * 8 + 7)
    table = table_of(kv, row)
    query = tl.arange(0, CONFIG.queries)
    d = tl.arange(0, SHAPE.block_d)
    index = query // SHAPE.group
    head = kv_head * SHAPE.group + query % SHAPE.group
    there = query < tokens * SHAPE.group
    wanted = there[:, None] & (d < DIMS)[None, :]
    earliest = length - tokens + 1  # how many positions the first query sees
    if not OPTIONS.causal:
        earliest = tl.load(positions + token) + 1
    lengths = tl.minimum(earliest + index, length)  # queries that are not there see what the newest does
    if OPTIONS.temperature > 0:
        scale = (scale * temperature_of(lengths, OPTIONS))[:, None]
    wait_for_previous(PDL)
    source = (token + index) * SHAPE.row_heads + head
    q = tl.load(qkv + source[:, None] * DIMS + d[None, :], wanted, 0.0)  # [QUERIES, BLOCK_D]
    if OPTIONS.q_gain:
        q = with_gain(q, q_gain, d, DIMS)

    oldest = first_seen(begin * 0, earliest, OPTIONS)
    if not OPTIONS.causal and OPTIONS.window:
        end = tl.minimum(end, earliest + tokens + OPTIONS.window - 2)
    softmax, heads = no_scores(CONFIG.queries, SHAPE.block_d), (kv_head, head)
    for start in tl.range(tl.maximum(begin, oldest // CONFIG.segment * CONFIG.segment), end, CONFIG.segment):
        top = tl.maximum(start, oldest // CONFIG.tile * CONFIG.tile)
        stop = tl.minimum(start + CONFIG.segment, end)
        found = attend_segment(q, kv, table, heads, top, stop, oldest, lengths, scale, cap, biases, CONFIG)
        softmax = join(softmax, found)

    which = split, first, count, split_kv.arrived + first * SHAPE.kv_heads + kv_head
    LINES: tl.constexpr = CONFIG.run * SHAPE.heads
    last, softmax = join_in_order(softmax, split_kv, which, index * SHAPE.heads + head, d, there, wanted, LINES, DIMS)
    if last:
        highest, total, mix = softmax
        if OPTIONS.sinks:
            total += sink_of(sinks, head, there, highest)
        store_mix(out, (token + index) * SHAPE.heads + head, d, mix, total, wanted, DIMS)


def segmented_attention(
    qkv: Any,
    cache: Any,
    splits: Any,
    positions: Any,
    tables: Any,
    header: Any,
    out: Any,
    split_kv: SplitKV,
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
    run: int,
    tiling: tuple[int, int, int],  # positions at a time, warps, stages
) -> None:
    """Attends with runs of at most `run` tokens, whose queries are rotated and whose keys are stored. splits [P, 8]: as
    in decode attention, one segment each or a whole context, which is a whole row where attention is not
    causal. positions: [T]. distance_bias is [heads, 2 * reach + 1]."""
    shape = heads_of(cache, qkv, out)
    options = AttentionOptions(
        window, soft_cap > 0, sinks is not None, causal, q_gain is not None, chunk, temperature, temperature_span
    )
    tile, warps, stages = tiling
    reach = 0 if distance_bias is None else len(distance_bias) // shape.heads // 2
    vectors = tuple(splits if vector is None else vector for vector in (sinks, q_gain, distance_bias))
    _segmented_attention[(shape.kv_heads, len(splits))](
        *(qkv, paged(cache, scales, tables, header), splits, positions, out, split_kv, vectors),
        *(scale * LOG2E, soft_cap * LOG2E),
        CONFIG=SegmentConfig(
            shape, options, kinds_of(cache, scales), queries_of(shape.group, run), tile, run, SEGMENT, reach
        ),
        enable_fp_fusion=False,
        **launch_options(warps, 1 if reach else stages),  # biases that are loaded ahead take much shared memory
    )
