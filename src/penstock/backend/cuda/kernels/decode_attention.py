"""Attention of single tokens over long contexts, which are cut into parts that run at once.

A program attends with all query heads of one KV head to one part. Parts are planned on the host (see inputs.py) and
read from device memory, so the grid of a captured graph does not depend on the lengths.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options

TILE = 64  # positions at a time
WARPS = 4
STAGES = 3
LOG2E = 1.4426950408889634


@triton.jit
def blocks_of(table, position, end, BLOCK_SIZE: tl.constexpr):
    """Loaded a tile ahead: a load whose address comes from a load of its own turn cannot be started early."""
    return tl.load(table + position // BLOCK_SIZE, position < end, 0).to(tl.int64)


@triton.jit
def _attend_parts(
    qkv,
    cache,
    parts,
    tables,
    header,
    out,
    mixed,
    weighed,
    scale,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    if PDL:
        gdc_wait()
    token = tl.load(parts + part * 6).to(tl.int64)
    if token < 0:
        return
    table = tables + tl.load(parts + part * 6 + 1).to(tl.int64) * tl.load(header)
    begin = tl.load(parts + part * 6 + 2)
    end = tl.load(parts + part * 6 + 3)
    alone = tl.load(parts + part * 6 + 5)
    if WINDOW:
        begin = tl.maximum(begin, tl.load(parts + part * 6 + 4) - WINDOW)

    query = tl.arange(0, QUERIES)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * SHARED + query
    wanted = (query < SHARED)[:, None] & (d < DIMS)[None, :]
    row = token * ((SHARED + 2) * KV_HEADS) + head
    q = tl.load(qkv + row[:, None] * DIMS + d[None, :], wanted, 0.0)  # [QUERIES, BLOCK_D]

    highest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mix = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    block = blocks_of(table, begin + tl.arange(0, TILE), end, BLOCK_SIZE)
    for start in tl.range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < end
        line = (block * (2 * KV_HEADS) + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
        block = blocks_of(table, position + TILE, end, BLOCK_SIZE)
        inside = seen[:, None] & (d < DIMS)[None, :]
        at = cache + line[:, None] * DIMS + d[None, :]
        keys = tl.load(at, inside, 0.0)  # [TILE, BLOCK_D]
        score = tl.dot(q, tl.trans(keys).to(q.dtype), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        peak = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score - peak[:, None])
        shrink = tl.exp2(highest - peak)
        total = total * shrink + tl.sum(weight, 1)
        values = tl.load(at + KV_HEADS * BLOCK_SIZE * DIMS, inside, 0.0).to(q.dtype)
        mix = tl.dot(weight.to(q.dtype), values, mix * shrink[:, None], input_precision="ieee")
        highest = peak

    if alone:
        target = out + (token * (SHARED * KV_HEADS) + head)[:, None] * DIMS + d[None, :]
        tl.store(target, (mix / total[:, None]).to(out.dtype.element_ty), wanted)
    else:
        line = part.to(tl.int64) * (SHARED * KV_HEADS) + head
        tl.store(mixed + line[:, None] * DIMS + d[None, :], mix, wanted)
        tl.store(weighed + line * 2, highest, query < SHARED)
        tl.store(weighed + line * 2 + 1, total, query < SHARED)


@triton.jit
def _join_parts(
    mixed,
    weighed,
    joins,
    out,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        gdc_wait()
    token = tl.load(joins + row * 3).to(tl.int64)
    first = tl.load(joins + row * 3 + 1)
    count = tl.load(joins + row * 3 + 2)
    if count < 2:
        return
    d = tl.arange(0, BLOCK_D)
    highest = -1e30
    total = 0.0
    mix = tl.zeros([BLOCK_D], tl.float32)
    for start in tl.range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        there = part < count
        line = (first + part).to(tl.int64) * HEADS + head
        peaks = tl.load(weighed + line * 2, there, -1e30)
        totals = tl.load(weighed + line * 2 + 1, there, 0.0)
        mixes = tl.load(mixed + line[:, None] * DIMS + d[None, :], there[:, None] & (d < DIMS)[None, :], 0.0)
        peak = tl.maximum(highest, tl.max(peaks, 0))
        factor = tl.exp2(peaks - peak)
        shrink = tl.exp2(highest - peak)
        total = total * shrink + tl.sum(totals * factor, 0)
        mix = mix * shrink + tl.sum(mixes * factor[:, None], 0)
        highest = peak
    target = out + (token * HEADS + head) * DIMS + d
    tl.store(target, (mix / total).to(out.dtype.element_ty), d < DIMS)


def attend_parts(
    qkv: Any,
    cache: Any,
    parts: Any,
    joins: Any,
    tables: Any,
    header: Any,
    out: Any,
    mixed: Any,
    weighed: Any,
    scale: float,
    window: int,
) -> None:
    """parts [P, 6]: token (-1: none), row of tables, begin, end, length of the whole context, whether it is the only
    part; joins [D, 3]: token, first part, parts. `mixed` [P, heads, D] and `weighed` [P, heads, 2] pass parts on to the
    join; header[0] is the width of tables."""
    kv_heads, block_size, dims = cache.shape[2:]
    heads = out.shape[1] // dims
    block_d = max(triton.next_power_of_2(dims), 16)
    _attend_parts[(kv_heads, len(parts))](
        qkv,
        cache,
        parts,
        tables,
        header,
        out,
        mixed,
        weighed,
        scale * LOG2E,
        WINDOW=window,
        KV_HEADS=kv_heads,
        SHARED=heads // kv_heads,
        DIMS=dims,
        BLOCK_SIZE=block_size,
        QUERIES=max(triton.next_power_of_2(heads // kv_heads), 16),
        BLOCK_D=block_d,
        TILE=TILE,
        **options(WARPS, STAGES),
    )
    if len(parts) > len(joins):
        _join_parts[(heads, len(joins))](
            mixed, weighed, joins, out, HEADS=heads, DIMS=dims, BLOCK_D=block_d, PARTS=16, **options()
        )
