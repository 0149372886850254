"""Attention of single tokens over long contexts, which are cut into parts that run at once.

A program attends with all query heads of one KV head to one part. Parts are planned on the host (see inputs.py) and
read from device memory, so the grid of a captured graph does not depend on the lengths. The last part of a context
brings its newest key and value into the cache; the program that is done last joins what all of them found.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.decode_attention_kv8 import QUERIES, key_order, mix_codes, value_order
from penstock.backend.cuda.kernels.kv8 import coded, scaling
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.backend.cuda.kernels.rope import rotation_of

TILING = 64, 4, 2  # positions at a time, warps, stages
CODED = 2, 2  # warps, groups of 16 positions for each at a time: over 8 bits
LOG2E = 1.4426950408889634


class Rotation(NamedTuple):
    """Rope for queries and the newest keys, which then go to `places` [T] in the cache."""

    inv_freq: Any  # [pairs] float64
    places: Any
    scale: float
    turned: int  # pairs of each head
    interleaved: bool


class SplitKV(NamedTuple):
    """What the programs of one context leave for the one that joins them; `arrived` is all zeros between launches."""

    mixed: Any  # [P * heads * D]
    weighed: Any  # [P * heads * 2]
    arrived: Any  # [rows * kv_heads]


@triton.jit
def soft_capped(score, cap):
    """cap * tanh(score / cap), both times log2(e)."""
    return cap * (1.0 - 2.0 / (tl.exp2(score / cap * 2.8853900817779268) + 1.0))


@triton.jit
def sink_of(sinks, head, there, highest):
    """What a head's sink adds to the sum of weights: once, after everything else, however that was shared out."""
    return tl.exp2(tl.load(sinks + head, there, 0.0) * 1.4426950408889634 - highest)


@triton.jit
def blocks_of(table, position, end, BLOCK_SIZE: tl.constexpr):
    """Loaded a tile ahead: a load whose address comes from a load of its own turn cannot be started early."""
    return tl.load(table + position // BLOCK_SIZE, position < end, 0).to(tl.int64)


@triton.jit
def _decode_attention(
    qkv,
    cache,
    scales,
    parts,
    tables,
    header,
    out,
    mixed,
    weighed,
    arrived,
    inv_freq,
    places,
    sinks,
    rope_scale,
    scale,
    cap,
    SUNK: tl.constexpr,
    ROPE: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    token = tl.load(parts + part * 8).to(tl.int64)
    if token < 0:
        return
    row = tl.load(parts + part * 8 + 1)
    table = tables + row.to(tl.int64) * tl.load(header)
    begin = tl.load(parts + part * 8 + 2)
    end = tl.load(parts + part * 8 + 3)
    length = tl.load(parts + part * 8 + 4)
    count = tl.load(parts + part * 8 + 5)
    first = tl.load(parts + part * 8 + 6)
    if WINDOW:
        begin = tl.maximum(begin, length - WINDOW)

    query = tl.arange(0, QUERIES)
    kept = tl.arange(0, BLOCK_D)  # the dimensions of what is found
    d = kept
    if GROUPS:
        d, kept = key_order(d), value_order(d, DIMS)
    head = kv_head * SHARED + query
    wanted = (query < SHARED)[:, None] & (d < DIMS)[None, :]
    source = token * ((SHARED + 2) * KV_HEADS) + head
    if ROPE:
        cos, sin, other = rotation_of(inv_freq, length - 1, rope_scale, d, TURNED, INTERLEAVED, DIMS)
    if PDL:
        gdc_wait()
    q = tl.load(qkv + source[:, None] * DIMS + d[None, :], wanted, 0.0)  # [QUERIES, BLOCK_D]
    if ROPE:
        q_other = tl.load(qkv + source[:, None] * DIMS + other[None, :], wanted, 0.0)
        q = (q.to(tl.float32) * cos[None, :] + q_other.to(tl.float32) * sin[None, :]).to(qkv.dtype.element_ty)
        if end == length:
            newest = qkv + (token * ((SHARED + 2) * KV_HEADS) + SHARED * KV_HEADS + kv_head) * DIMS
            key = tl.load(newest + d, d < DIMS, 0.0).to(tl.float32) * cos
            key += tl.load(newest + other, d < DIMS, 0.0).to(tl.float32) * sin
            value = tl.load(newest + KV_HEADS * DIMS + d, d < DIMS, 0.0)
            place = tl.load(places + token).to(tl.int64)
            line = (place // BLOCK_SIZE * (2 * KV_HEADS) + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE
            target = cache + line * DIMS + d
            key = key.to(qkv.dtype.element_ty)
            if SCALED:
                key, value = key.to(tl.float32), value.to(tl.float32)
                key_scale = tl.maximum(tl.max(tl.abs(key), 0), 1e-12) / LARGEST
                value_scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / LARGEST
                tl.store(scales + line, key_scale)
                tl.store(scales + line + KV_HEADS * BLOCK_SIZE, value_scale)
                key = coded(key, key_scale, cache.dtype.element_ty, INTERPRET)
                value = coded(value, value_scale, cache.dtype.element_ty, INTERPRET)
            tl.store(target, key.to(cache.dtype.element_ty), d < DIMS)
            tl.store(target + KV_HEADS * BLOCK_SIZE * DIMS, value.to(cache.dtype.element_ty), d < DIMS)
        tl.debug_barrier()

    if GROUPS:
        highest, total, mix = mix_codes(
            q, cache, scales, table, kv_head, begin, end, scale, KV_HEADS, DIMS, BLOCK_SIZE, WARPS, GROUPS, INTERPRET
        )
    else:
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
            if SCALED:
                score *= tl.load(scales + line, seen, 0.0)[None, :]
            if CAPPED:
                score = soft_capped(score, cap)
            score = tl.where(seen[None, :], score, -float("inf"))
            peak = tl.maximum(highest, tl.max(score, 1))
            weight = tl.exp2(score - peak[:, None])
            shrink = tl.exp2(highest - peak)
            total = total * shrink + tl.sum(weight, 1)
            values = tl.load(at + KV_HEADS * BLOCK_SIZE * DIMS, inside, 0.0).to(q.dtype)
            if SCALED:
                weight *= tl.load(scales + line + KV_HEADS * BLOCK_SIZE, seen, 0.0)[None, :]
            mix = tl.dot(weight.to(q.dtype), values, mix * shrink[:, None], input_precision="ieee")
            highest = peak

    if count == 1:
        if SUNK:
            total += sink_of(sinks, head, query < SHARED, highest)
        target = out + (token * (SHARED * KV_HEADS) + head)[:, None] * DIMS + kept[None, :]
        tl.store(target, (mix / total[:, None]).to(out.dtype.element_ty), wanted)
    else:
        mine = part.to(tl.int64) * (SHARED * KV_HEADS) + head
        tl.store(mixed + mine[:, None] * DIMS + kept[None, :], mix, wanted)
        tl.store(weighed + mine * 2, highest, query < SHARED)
        tl.store(weighed + mine * 2 + 1, total, query < SHARED)
        tl.debug_barrier()
        arrivals = arrived + row * KV_HEADS + kv_head
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == count - 1:
            tl.store(arrivals, 0)
            found = mixed, weighed, sinks
            _join(found, out, token, kv_head, first, count, SUNK, KV_HEADS, SHARED, DIMS, BLOCK_D, TILE // 4)


@triton.jit
def _join(
    found,
    out,
    token,
    kv_head,
    first,
    count,
    SUNK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    mixed, weighed, sinks = found
    SHARES: tl.constexpr = triton.next_power_of_2(SHARED)
    d = tl.arange(0, BLOCK_D)
    query = tl.arange(0, SHARES)
    head = kv_head * SHARED + query
    highest = tl.full([SHARES], -1e30, tl.float32)
    total = tl.zeros([SHARES], tl.float32)
    mix = tl.zeros([SHARES, BLOCK_D], tl.float32)
    for start in tl.range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        there = (part < count)[:, None] & (query < SHARED)[None, :]  # [PARTS, SHARES]
        line = (first + part).to(tl.int64)[:, None] * (SHARED * KV_HEADS) + head[None, :]
        peaks = tl.load(weighed + line * 2, there, -1e30, cache_modifier=".cg")
        totals = tl.load(weighed + line * 2 + 1, there, 0.0, cache_modifier=".cg")
        inside = there[:, :, None] & (d < DIMS)[None, None, :]
        mixes = tl.load(mixed + line[:, :, None] * DIMS + d[None, None, :], inside, 0.0, cache_modifier=".cg")
        peak = tl.maximum(highest, tl.max(peaks, 0))
        factor = tl.exp2(peaks - peak[None, :])
        shrink = tl.exp2(highest - peak)
        total = total * shrink + tl.sum(totals * factor, 0)
        mix = mix * shrink[:, None] + tl.sum(mixes * factor[:, :, None], 0)
        highest = peak
    if SUNK:
        total += sink_of(sinks, head, query < SHARED, highest)
    target = out + (token * (SHARED * KV_HEADS) + head)[:, None] * DIMS + d[None, :]
    tl.store(target, (mix / total[:, None]).to(out.dtype.element_ty), (query < SHARED)[:, None] & (d < DIMS)[None, :])


def _in_registers(itemsize: int, shared: int, dims: int, block_size: int) -> bool:
    """Whether coded_attention.py does it: not for activations of 32 bits, which want more than float16 holds."""
    return itemsize == 2 and shared <= QUERIES and dims in (64, 128) and block_size % 16 == 0


def decode_attention(
    qkv: Any,
    cache: Any,
    parts: Any,
    tables: Any,
    header: Any,
    out: Any,
    shares: SplitKV,
    turn: Rotation | None,
    scale: float,
    window: int,
    scales: Any | None = None,
    soft_cap: float = 0.0,
    sinks: Any | None = None,
    tiling: tuple[int, int, int] = TILING,
) -> None:
    """parts [P, 8]: token (-1: none), row of tables, begin, end, length of the whole context, how many parts it has and
    the first of them; header[0] is the width of tables. Without `turn`, queries are turned and keys stored already."""
    kv_heads, block_size, dims = cache.shape[2:]
    heads = out.shape[1] // dims
    queries = max(triton.next_power_of_2(heads // kv_heads), 16)
    tile, warps, stages = tiling
    groups = 0
    if scales is not None and not soft_cap and _in_registers(qkv.element_size(), heads // kv_heads, dims, block_size):
        queries, (warps, groups) = QUERIES, CODED
    _decode_attention[(kv_heads, len(parts))](
        qkv,
        cache,
        parts if scales is None else scales,
        parts,
        tables,
        header,
        out,
        *shares,
        turn.inv_freq if turn else parts,
        turn.places if turn else parts,
        parts if sinks is None else sinks,
        turn.scale if turn else 1.0,
        scale * LOG2E,
        soft_cap * LOG2E,
        SUNK=sinks is not None,
        ROPE=turn is not None,
        TURNED=turn.turned if turn else 0,
        INTERLEAVED=turn is not None and turn.interleaved,
        CAPPED=soft_cap > 0,
        WINDOW=window,
        KV_HEADS=kv_heads,
        SHARED=heads // kv_heads,
        DIMS=dims,
        BLOCK_SIZE=block_size,
        QUERIES=queries,
        BLOCK_D=max(triton.next_power_of_2(dims), 16),
        TILE=tile,
        WARPS=warps,
        GROUPS=groups,
        **scaling(cache, scales),
        **options(warps, stages),
    )
