"""Latent attention: one KV head for all queries, whose values are the last dimensions of its keys.

A cache is [blocks, block_size, D]: what is turned, then values. One of 8 bits has scales beside it, [blocks, 2,
block_size], of what is turned and of values. What is read of a key serves as key and value, and heads of 576 dimensions
leave room for few positions at a time.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.decode_attention import LOG2E, SplitKV, blocks_of
from penstock.backend.cuda.kernels.kv8 import coded, scaling
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.backend.cuda.kernels.prefill_attention import tokens_per_tile
from penstock.backend.cuda.kernels.rope import angle_of

HEADS = 16  # turned by one program
FEW = 16, 32, 4, 2  # queries, positions at a time, warps, stages: for one token's heads
MANY = 64, 32, 8, 2


@triton.jit
def _store_mla_kv(
    q,
    kv,
    gain,
    inv_freq,
    positions,
    places,
    cache,
    scales,
    rope_scale,
    eps,
    Q_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first program of a token stores its key, the others turn queries."""
    if PDL:
        gdc_launch_dependents()
    DIMS: tl.constexpr = 2 * PAIRS + V_DIM
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_P)
    angle = angle_of(tl.load(positions + token), tl.load(inv_freq + pair, pair < PAIRS, 0.0))
    cos, sin = tl.cos(angle) * rope_scale, tl.sin(angle) * rope_scale
    left = pair * 2 if INTERLEAVED else pair
    right = pair * 2 + 1 if INTERLEAVED else pair + PAIRS
    place = tl.load(places + token).to(tl.int64)
    if PDL:
        gdc_wait()
    if tl.program_id(1) == 0:
        source = kv + token * DIMS
        a = tl.load(source + left, pair < PAIRS, 0.0).to(tl.float32)
        b = tl.load(source + right, pair < PAIRS, 0.0).to(tl.float32)
        turned_a = (a * cos - b * sin).to(kv.dtype.element_ty)
        turned_b = (b * cos + a * sin).to(kv.dtype.element_ty)
        d = tl.arange(0, BLOCK_V)
        value = tl.load(source + 2 * PAIRS + d, d < V_DIM, 0.0).to(tl.float32)
        value *= tl.rsqrt(tl.sum(value * value, 0) / V_DIM + eps)
        value = (value * tl.load(gain + d, d < V_DIM, 0.0)).to(kv.dtype.element_ty)
        target = cache + place * DIMS
        if SCALED:
            line = place // BLOCK_SIZE * (2 * BLOCK_SIZE) + place % BLOCK_SIZE
            turned_a, turned_b, value = turned_a.to(tl.float32), turned_b.to(tl.float32), value.to(tl.float32)
            largest = tl.max(tl.maximum(tl.abs(turned_a), tl.abs(turned_b)), 0)
            turned_scale = tl.maximum(largest, 1e-12) / LARGEST
            value_scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / LARGEST
            tl.store(scales + line, turned_scale)
            tl.store(scales + line + BLOCK_SIZE, value_scale)
            turned_a = coded(turned_a, turned_scale, cache.dtype.element_ty, INTERPRET)
            turned_b = coded(turned_b, turned_scale, cache.dtype.element_ty, INTERPRET)
            value = coded(value, value_scale, cache.dtype.element_ty, INTERPRET)
        tl.store(target + left, turned_a.to(cache.dtype.element_ty), pair < PAIRS)
        tl.store(target + right, turned_b.to(cache.dtype.element_ty), pair < PAIRS)
        tl.store(target + 2 * PAIRS + d, value.to(cache.dtype.element_ty), d < V_DIM)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        inside = (head < Q_HEADS)[:, None] & (pair < PAIRS)[None, :]
        query = q + (token * Q_HEADS + head)[:, None] * DIMS
        one = tl.load(query + left[None, :], inside, 0.0).to(tl.float32)
        other = tl.load(query + right[None, :], inside, 0.0).to(tl.float32)
        tl.store(query + left[None, :], (one * cos[None, :] - other * sin[None, :]).to(q.dtype.element_ty), inside)
        tl.store(query + right[None, :], (other * cos[None, :] + one * sin[None, :]).to(q.dtype.element_ty), inside)


def store_mla_kv(
    q: Any,
    kv: Any,
    gain: Any,
    eps: float,
    inv_freq: Any,
    rope_scale: float,
    interleaved: bool,
    positions: Any,
    places: Any,
    cache: Any,
    scales: Any | None = None,
) -> None:
    """q [T, heads * D] is turned in place; kv [T, D], its values normed, goes to `places` [T], counted in tokens from
    the cache's start."""
    heads, v_dim = q.shape[1] // kv.shape[1], len(gain)
    pairs = (kv.shape[1] - v_dim) // 2
    _store_mla_kv[(len(q), 1 + triton.cdiv(heads, HEADS))](
        q,
        kv,
        gain,
        inv_freq,
        positions,
        places,
        cache,
        inv_freq if scales is None else scales,
        rope_scale,
        eps,
        Q_HEADS=heads,
        PAIRS=pairs,
        V_DIM=v_dim,
        BLOCK_SIZE=cache.shape[1],
        INTERLEAVED=interleaved,
        HEADS=HEADS,
        BLOCK_P=triton.next_power_of_2(pairs),
        BLOCK_V=triton.next_power_of_2(v_dim),
        **scaling(cache, scales),
        **options(),
    )


@triton.jit
def _gather(
    q,
    row,
    own,
    wanted,
    cache,
    scales,
    table,
    begin,
    end,
    scale,
    TURNED: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """What the queries in these rows of q, at their own positions, find from `begin` to `end`: their highest score, the
    sum of weights, and the mix of values [QUERIES, BLOCK_V]."""
    DIMS: tl.constexpr = TURNED + V_DIM
    r, v = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    source = q + row[:, None] * DIMS
    q_turned = tl.load(source + r[None, :], wanted[:, None] & (r < TURNED)[None, :], 0.0)
    q_value = tl.load(source + TURNED + v[None, :], wanted[:, None] & (v < V_DIM)[None, :], 0.0)
    highest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mix = tl.zeros([QUERIES, BLOCK_V], tl.float32)
    block = blocks_of(table, begin + tl.arange(0, TILE), end, BLOCK_SIZE)
    for start in tl.range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < end
        at = cache + (block * BLOCK_SIZE + position % BLOCK_SIZE)[:, None] * DIMS
        scale_at = scales + block * (2 * BLOCK_SIZE) + position % BLOCK_SIZE
        block = blocks_of(table, position + TILE, end, BLOCK_SIZE)
        values = tl.load(at + TURNED + v[None, :], seen[:, None] & (v < V_DIM)[None, :], 0.0).to(q.dtype.element_ty)
        turned = tl.load(at + r[None, :], seen[:, None] & (r < TURNED)[None, :], 0.0).to(q.dtype.element_ty)
        score = tl.dot(q_value, tl.trans(values), input_precision="ieee")
        if SCALED:
            value_scale = tl.load(scale_at + BLOCK_SIZE, seen, 0.0)[None, :]
            score *= value_scale
            score += tl.dot(q_turned, tl.trans(turned), input_precision="ieee") * tl.load(scale_at, seen, 0.0)[None, :]
        else:
            score = tl.dot(q_turned, tl.trans(turned), score, input_precision="ieee")
        score = tl.where(seen[None, :] & (position[None, :] <= own[:, None]), score * scale, -float("inf"))
        peak = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score - peak[:, None])
        shrink = tl.exp2(highest - peak)
        total = total * shrink + tl.sum(weight, 1)
        if SCALED:
            weight *= value_scale
        mix = tl.dot(weight.to(q.dtype.element_ty), values, mix * shrink[:, None], input_precision="ieee")
        highest = peak
    return highest, total, mix


@triton.jit
def _mla_decode(
    q,
    cache,
    scales,
    parts,
    tables,
    header,
    out,
    mixed,
    weighed,
    arrived,
    scale,
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    group, part = tl.program_id(0), tl.program_id(1)
    token = tl.load(parts + part * 8).to(tl.int64)
    if token < 0:
        return
    row = tl.load(parts + part * 8 + 1)
    table = tables + row.to(tl.int64) * tl.load(header)
    begin = tl.load(parts + part * 8 + 2)
    end = tl.load(parts + part * 8 + 3)
    count = tl.load(parts + part * 8 + 5)
    first = tl.load(parts + part * 8 + 6)
    head = group * QUERIES + tl.arange(0, QUERIES)
    there = head < HEADS
    v = tl.arange(0, BLOCK_V)
    wanted = there[:, None] & (v < V_DIM)[None, :]
    if PDL:
        gdc_wait()
    highest, total, mix = _gather(
        q,
        token * HEADS + head,
        head * 0 + end,
        there,
        cache,
        scales,
        table,
        begin,
        end,
        scale,
        TURNED,
        V_DIM,
        BLOCK_SIZE,
        QUERIES,
        BLOCK_R,
        BLOCK_V,
        TILE,
        SCALED,
    )
    if count > 1:
        mine = part.to(tl.int64) * HEADS + head
        tl.store(mixed + mine[:, None] * V_DIM + v[None, :], mix, wanted)
        tl.store(weighed + mine * 2, highest, there)
        tl.store(weighed + mine * 2 + 1, total, there)
        tl.debug_barrier()
        arrivals = arrived + row * tl.num_programs(0) + group
        if tl.atomic_add(arrivals, 1, sem="acq_rel") != count - 1:
            return
        tl.store(arrivals, 0)
        highest = tl.full([QUERIES], -1e30, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mix = tl.zeros([QUERIES, BLOCK_V], tl.float32)
        for index in tl.range(0, count):
            line = (first + index).to(tl.int64) * HEADS + head
            highest_there = tl.load(weighed + line * 2, there, -1e30, cache_modifier=".cg")
            total_there = tl.load(weighed + line * 2 + 1, there, 0.0, cache_modifier=".cg")
            mix_there = tl.load(mixed + line[:, None] * V_DIM + v[None, :], wanted, 0.0, cache_modifier=".cg")
            peak = tl.maximum(highest, highest_there)
            shrink, factor = tl.exp2(highest - peak), tl.exp2(highest_there - peak)
            total = total * shrink + total_there * factor
            mix = mix * shrink[:, None] + mix_there * factor[:, None]
            highest = peak
    target = out + (token * HEADS + head)[:, None] * V_DIM + v[None, :]
    tl.store(target, (mix / total[:, None]).to(out.dtype.element_ty), wanted)


@triton.jit
def _mla_prefill(
    q,
    cache,
    scales,
    tiles,
    tables,
    header,
    out,
    scale,
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows are pairs of token and head."""
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(1)
    if PDL:
        gdc_wait()
    token = tl.load(tiles + tile * 5).to(tl.int64)
    if token < 0:
        return
    table = tables + tl.load(tiles + tile * 5 + 1).to(tl.int64) * tl.load(header)
    first = tl.load(tiles + tile * 5 + 2)
    count = tl.load(tiles + tile * 5 + 3)
    pair = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    if tl.program_id(0) * QUERIES >= count * HEADS:
        return
    last = tl.minimum((tl.program_id(0) * QUERIES + QUERIES - 1) // HEADS, count - 1)  # token of this program
    there = pair < count * HEADS
    _, total, mix = _gather(
        q,
        token * HEADS + pair,
        first + pair // HEADS,
        there,
        cache,
        scales,
        table,
        0,
        first + last + 1,
        scale,
        TURNED,
        V_DIM,
        BLOCK_SIZE,
        QUERIES,
        BLOCK_R,
        BLOCK_V,
        TILE,
        SCALED,
    )
    v = tl.arange(0, BLOCK_V)
    target = out + (token * HEADS + pair)[:, None] * V_DIM + v[None, :]
    tl.store(target, (mix / total[:, None]).to(out.dtype.element_ty), there[:, None] & (v < V_DIM)[None, :])


def mla_decode(
    q: Any,
    cache: Any,
    parts: Any,
    tables: Any,
    header: Any,
    out: Any,
    shares: SplitKV,
    v_dim: int,
    scale: float,
    scales: Any | None = None,
) -> None:
    """As decode_attention, of queries that are turned and keys that are stored."""
    heads = out.shape[1] // v_dim
    shape, launch = about(FEW, cache, scales, heads, v_dim)
    _mla_decode[(triton.cdiv(heads, FEW[0]), len(parts))](
        q,
        cache,
        parts if scales is None else scales,
        parts,
        tables,
        header,
        out,
        *shares,
        scale * LOG2E,
        **shape,
        **launch,
    )


def mla_prefill(
    q: Any,
    cache: Any,
    tiles: Any,
    tables: Any,
    header: Any,
    out: Any,
    v_dim: int,
    scale: float,
    scales: Any | None = None,
    tiling: tuple[int, int, int] = MANY[1:],
) -> None:
    """As prefill_attention, of tiles that hold at most tokens_per_tile(heads)."""
    heads = out.shape[1] // v_dim
    shape, launch = about((MANY[0], *tiling), cache, scales, heads, v_dim)
    _mla_prefill[(triton.cdiv(tokens_per_tile(heads) * heads, MANY[0]), len(tiles))](
        q, cache, tiles if scales is None else scales, tiles, tables, header, out, scale * LOG2E, **shape, **launch
    )


def about(
    sizes: tuple[int, int, int, int], cache: Any, scales: Any | None, heads: int, v_dim: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    queries, tile, warps, stages = sizes
    turned = cache.shape[2] - v_dim
    shape = {
        "HEADS": heads,
        "TURNED": turned,
        "V_DIM": v_dim,
        "BLOCK_SIZE": cache.shape[1],
        "QUERIES": queries,
        "BLOCK_R": max(triton.next_power_of_2(turned), 16),
        "BLOCK_V": max(triton.next_power_of_2(v_dim), 16),
        "TILE": tile,
    }
    return shape, scaling(cache, scales) | options(warps, stages)
