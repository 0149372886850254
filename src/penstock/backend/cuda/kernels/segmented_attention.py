"""Attention whose sums depend on a token's own context alone: not on the tokens and rows computed beside it.

A program attends with a run of a row's tokens, and all query heads of one KV head, to a whole context or to one
segment of it (segments.py). Segments begin at multiples of SEGMENT positions, tiles of positions at multiples of their
size. What a query finds in a segment is joined to what it has found in those before, in their order: by the program
itself, or by the one that is done last. Prompts, answers and drafts attend with the same compiled kernel, which
multiplies tiles of one size; products and sums are not contracted, so that both places that join round alike.
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
from penstock.backend.cuda.kernels.kv8 import largest_of
from penstock.backend.cuda.kernels.kv_tile import (
    LOG2E,
    KvShape,
    PagedKv,
    SplitKV,
    first_seen,
    leave_split,
    line_of,
    load_blocks,
    load_split,
    no_scores,
    sees,
    shape_of,
    soft_capped,
    soften,
    store_mix,
    table_of,
)
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.segments import SEGMENT


class SegmentConfig(NamedTuple):
    """Holds the constants of a launch."""

    shape: KvShape
    options: AttentionOptions
    largest: float  # of the cache's type; 0: it has no scales
    queries: int
    tile: int  # positions
    run: int  # tokens of a row that attend together, at most
    segment: int  # positions


@triton.jit
def join(softmax, found):
    """Returns a running softmax after what was found in the next segment."""
    highest, total, mix = softmax
    peaks, totals, mixes = found
    peak = tl.maximum(highest, peaks)
    shrink, factor = tl.exp2(highest - peak), tl.exp2(peaks - peak)
    return peak, total * shrink + totals * factor, mix * shrink[:, None] + mixes * factor[:, None]


@triton.jit
def attend_segment(q, kv, table, kv_head, begin, end, oldest, lengths, scale, cap, CONFIG: tl.constexpr):
    """Returns what queries find from `begin` to `end`: the highest score, the sum of weights, and the mix of values. A
    query sees what the newest of its `lengths` positions does; nothing is loaded from before `oldest`."""
    SHAPE: tl.constexpr = CONFIG.shape
    OPTIONS: tl.constexpr = CONFIG.options
    TILE: tl.constexpr = CONFIG.tile
    d = tl.arange(0, SHAPE.block_d)
    highest, total, mix = no_scores(CONFIG.queries, SHAPE.block_d)
    block = load_blocks(table, begin + tl.arange(0, TILE), end, SHAPE.block_size)
    for start in tl.range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = (position < end) & (position >= oldest)  # tables name any block at all before that
        line = line_of(block, position, kv_head, SHAPE)
        block = load_blocks(table, position + TILE, end, SHAPE.block_size)
        inside = seen[:, None] & (d < SHAPE.dims)[None, :]
        at = kv.lines + line[:, None] * SHAPE.dims + d[None, :]
        keys = tl.load(at, inside, 0.0)  # [TILE, BLOCK_D]
        score = tl.dot(q, tl.trans(keys).to(q.dtype), input_precision="ieee") * scale
        if CONFIG.largest > 0:
            score *= tl.load(kv.scales + line, seen, 0.0)[None, :]
        if OPTIONS.capped:
            score = soft_capped(score, cap)
        visible = seen[None, :] & sees(position[None, :], lengths[:, None], OPTIONS)
        score = tl.where(visible, score, -float("inf"))
        highest, weight, shrink, total = soften(score, highest, total)
        values = tl.load(at + SHAPE.apart * SHAPE.dims, inside, 0.0).to(q.dtype)
        if CONFIG.largest > 0:
            weight *= tl.load(kv.scales + line + SHAPE.apart, seen, 0.0)[None, :]
        mix = tl.dot(weight.to(q.dtype), values, mix * shrink[:, None], input_precision="ieee")
    return highest, total, mix


@triton.jit
def _segmented_attention(
    qkv, kv, splits, out, split_kv, sinks, q_gain, scale, cap, CONFIG: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    SHAPE: tl.constexpr = CONFIG.shape
    OPTIONS: tl.constexpr = CONFIG.options
    DIMS: tl.constexpr = SHAPE.dims
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
    lengths = tl.minimum(length - tokens + 1 + index, length)  # queries that are not there see what the newest does
    if OPTIONS.temperature > 0:
        scale = (scale * temperature_of(lengths, OPTIONS))[:, None]
    wait_for_previous(PDL)
    source = (token + index) * SHAPE.row_heads + head
    q = tl.load(qkv + source[:, None] * DIMS + d[None, :], wanted, 0.0)  # [QUERIES, BLOCK_D]
    if OPTIONS.q_gain:
        q = with_gain(q, q_gain, d, DIMS)

    oldest = first_seen(begin * 0, length - tokens + 1, OPTIONS)
    softmax = no_scores(CONFIG.queries, SHAPE.block_d)
    for start in tl.range(tl.maximum(begin, oldest // CONFIG.segment * CONFIG.segment), end, CONFIG.segment):
        top = tl.maximum(start, oldest // CONFIG.tile * CONFIG.tile)
        stop = tl.minimum(start + CONFIG.segment, end)
        found = attend_segment(q, kv, table, kv_head, top, stop, oldest, lengths, scale, cap, CONFIG)
        softmax = join(softmax, found)

    last = count == 1
    if count > 1:
        highest, total, mix = softmax
        mine = (split.to(tl.int64) * CONFIG.run + index) * SHAPE.heads + head
        leave_split(split_kv, mine, d, mix, highest, total, there, wanted, DIMS)
        arrivals = split_kv.arrived + first * SHAPE.kv_heads + kv_head
        last = tl.atomic_add(arrivals, 1, sem="acq_rel") == count - 1
        if last:
            tl.store(arrivals, 0)
            softmax = no_scores(CONFIG.queries, SHAPE.block_d)
            for other in tl.range(0, count):
                line = ((first + other).to(tl.int64) * CONFIG.run + index) * SHAPE.heads + head
                peaks = tl.load(split_kv.stats + line * 2, there, -1e30, cache_modifier=".cg")
                totals = tl.load(split_kv.stats + line * 2 + 1, there, 0.0, cache_modifier=".cg")
                place = split_kv.outputs + line[:, None] * DIMS + d[None, :]
                softmax = join(softmax, (peaks, totals, tl.load(place, wanted, 0.0, cache_modifier=".cg")))
    if last:
        highest, total, mix = softmax
        if OPTIONS.sinks:
            total += sink_of(sinks, head, there, highest)
        store_mix(out, (token + index) * SHAPE.heads + head, d, mix, total, wanted, DIMS)


def segmented_attention(
    qkv: Any,
    cache: Any,
    splits: Any,
    tables: Any,
    header: Any,
    out: Any,
    split_kv: SplitKV,
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
    run: int,
    tiling: tuple[int, int, int],  # positions at a time, warps, stages
) -> None:
    """Attends with runs of at most `run` tokens, whose queries are rotated and whose keys are stored. splits [P, 8]: as
    those of decode attention, of one segment each or of a whole context."""
    shape = shape_of(cache, qkv, out)
    others = chunk, temperature, temperature_span
    options = AttentionOptions(window, soft_cap > 0, sinks is not None, True, q_gain is not None, *others)
    tile, warps, stages = tiling
    sizes = queries_of(shape.group, run), tile, run, SEGMENT
    _segmented_attention[(shape.kv_heads, len(splits))](
        *(qkv, PagedKv(cache, splits if scales is None else scales, tables, header), splits, out, split_kv),
        *(splits if vector is None else vector for vector in (sinks, q_gain)),
        *(scale * LOG2E, soft_cap * LOG2E),
        CONFIG=SegmentConfig(shape, options, largest_of(cache, scales), *sizes),
        enable_fp_fusion=False,
        **launch_options(warps, stages),
    )
