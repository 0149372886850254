"""Multi-head latent attention (MLA) in its absorbed form: one KV head for all queries, whose values are the last
dimensions of its keys.

A cache is [blocks, block_size, D]: the dimensions with RoPE, then values. One of 8 bits also has scales, [blocks,
2, block_size], for both parts. A key is read once, for use as key and value, and heads of 576 dimensions leave room for
few positions at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.kv8 import largest_of, quantize_kv, scale_of
from penstock.backend.cuda.kernels.kv_tile import (
    LOG2E,
    PagedKv,
    SplitKV,
    leave_split,
    load_blocks,
    load_split,
    no_scores,
    soften,
    store_mix,
    table_of,
)
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.prefill_attention import load_tile, tokens_per_tile
from penstock.backend.cuda.kernels.rope import RopeInputs, angle_of, rotate_pair
from penstock.backend.cuda.kernels.select_positions import load_work

HEADS = 16  # rotated by one program


class MlaTiling(NamedTuple):
    """Says how attention is tiled: each program has `queries` pairs of token and head."""

    queries: int
    positions: int  # at a time
    warps: int
    stages: int


ALL = 1 << 30  # positions, where a token attends to all that it sees


class MlaShape(NamedTuple):
    """Holds the constants of a layer's heads and cache, and of how they are cut up."""

    heads: int
    rope_dims: int
    v_dim: int
    block_size: int
    queries: int
    block_r: int  # rope_dims rounded up to a power of two
    block_v: int
    tile: int  # positions at a time


@triton.jit
def store_key(source, cache, scales, place, gain, eps, rotation, SHAPE: tl.constexpr, LARGEST: tl.constexpr):
    """Rotates the first part of a token's key, norms its values and stores both at `place`; `rotation` is (left, right,
    cos, sin) of pairs."""
    PAIRS: tl.constexpr = SHAPE.rope_dims // 2
    V_DIM: tl.constexpr = SHAPE.v_dim
    DTYPE: tl.constexpr = cache.dtype.element_ty
    left, right, cos, sin = rotation
    pair = tl.arange(0, SHAPE.block_r)
    a = tl.load(source + left, pair < PAIRS, 0.0).to(tl.float32)
    b = tl.load(source + right, pair < PAIRS, 0.0).to(tl.float32)
    a, b = rotate_pair(a, b, cos, sin)
    a, b = a.to(source.dtype.element_ty), b.to(source.dtype.element_ty)
    d = tl.arange(0, SHAPE.block_v)
    value = tl.load(source + 2 * PAIRS + d, d < V_DIM, 0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / V_DIM + eps)
    value = (value * tl.load(gain + d, d < V_DIM, 0.0)).to(source.dtype.element_ty)
    target = cache + place * (2 * PAIRS + V_DIM)
    if LARGEST > 0:
        line = place // SHAPE.block_size * (2 * SHAPE.block_size) + place % SHAPE.block_size
        a, b, value = a.to(tl.float32), b.to(tl.float32), value.to(tl.float32)
        key_scale = scale_of(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 0), LARGEST)
        value_scale = scale_of(tl.max(tl.abs(value), 0), LARGEST)
        tl.store(scales + line, key_scale)
        tl.store(scales + line + SHAPE.block_size, value_scale)
        a, b = quantize_kv(a, key_scale, DTYPE), quantize_kv(b, key_scale, DTYPE)
        value = quantize_kv(value, value_scale, DTYPE)
    tl.store(target + left, a.to(DTYPE), pair < PAIRS)
    tl.store(target + right, b.to(DTYPE), pair < PAIRS)
    tl.store(target + 2 * PAIRS + d, value.to(DTYPE), d < V_DIM)


@triton.jit
def _store_mla_kv(
    q,
    kv,
    gain,
    eps,
    rope,
    cache,
    scales,
    SHAPE: tl.constexpr,
    NOPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first program of a token stores its key; the others rotate queries."""
    let_next_start(PDL)
    PAIRS: tl.constexpr = SHAPE.rope_dims // 2
    DIMS: tl.constexpr = SHAPE.rope_dims + SHAPE.v_dim
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, SHAPE.block_r)
    angle = angle_of(tl.load(rope.positions + token), tl.load(rope.inv_freq + pair, pair < PAIRS, 0.0))
    cos, sin = tl.cos(angle) * rope.scale, tl.sin(angle) * rope.scale
    left = pair * 2 if INTERLEAVED else pair
    right = pair * 2 + 1 if INTERLEAVED else pair + PAIRS
    place = tl.load(rope.places + token).to(tl.int64)
    wait_for_previous(PDL)
    if tl.program_id(1) == 0:
        store_key(kv + token * DIMS, cache, scales, place, gain, eps, (left, right, cos, sin), SHAPE, LARGEST)
    else:
        head = (tl.program_id(1) - 1) * SHAPE.queries + tl.arange(0, SHAPE.queries)
        inside = (head < SHAPE.heads)[:, None] & (pair < PAIRS)[None, :]
        query = q + (token * SHAPE.heads + head)[:, None] * (NOPE + SHAPE.rope_dims) + NOPE
        one = tl.load(query + left[None, :], inside, 0.0).to(tl.float32)
        other = tl.load(query + right[None, :], inside, 0.0).to(tl.float32)
        one, other = rotate_pair(one, other, cos[None, :], sin[None, :])
        tl.store(query + left[None, :], one.to(q.dtype.element_ty), inside)
        tl.store(query + right[None, :], other.to(q.dtype.element_ty), inside)


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
    *,
    heads: int,
) -> None:
    """Rotates q [T, heads * (nope + rope)] in place and stores kv [T, D], its values normed, at `places` [T], counted
    in tokens from the cache's start."""
    v_dim = len(gain)
    pairs = (kv.shape[1] - v_dim) // 2
    rope = RopeInputs(inv_freq, positions, places, rope_scale)
    _store_mla_kv[(len(q), 1 + triton.cdiv(heads, HEADS))](
        *(q, kv, gain, eps, rope, cache, inv_freq if scales is None else scales),
        SHAPE=MlaShape(
            heads,
            2 * pairs,
            v_dim,
            cache.shape[1],
            HEADS,
            triton.next_power_of_2(pairs),
            triton.next_power_of_2(v_dim),
            0,
        ),
        NOPE=q.shape[1] // heads - 2 * pairs,
        INTERLEAVED=interleaved,
        LARGEST=largest_of(cache, scales),
        **launch_options(),
    )


@triton.jit
def attend_mla(
    q,
    row,
    own,
    wanted,
    kv,
    table,
    begin,
    end,
    scale,
    SHAPE: tl.constexpr,
    LARGEST: tl.constexpr,
    selected=None,
    SELECTED: tl.constexpr = False,
):
    """Attends with the queries in these rows of q, at their own positions, from `begin` to `end`; returns their highest
    score, the sum of weights, and the mix of values [QUERIES, BLOCK_V]. With SELECTED, `begin` and `end` count the
    selected positions."""
    ROPE: tl.constexpr = SHAPE.rope_dims
    V_DIM: tl.constexpr = SHAPE.v_dim
    TILE: tl.constexpr = SHAPE.tile
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    r, v = tl.arange(0, SHAPE.block_r), tl.arange(0, SHAPE.block_v)
    source = q + row[:, None] * (ROPE + V_DIM)
    q_rope = tl.load(source + r[None, :], wanted[:, None] & (r < ROPE)[None, :], 0.0)
    q_value = tl.load(source + ROPE + v[None, :], wanted[:, None] & (v < V_DIM)[None, :], 0.0)
    highest, total, mix = no_scores(SHAPE.queries, SHAPE.block_v)
    block = load_blocks(table, begin + tl.arange(0, TILE), end, BLOCK_SIZE)  # not used with SELECTED
    for start in tl.range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < end
        if SELECTED:
            position = tl.load(selected + position, seen, 0.0).to(tl.int32)
            block = tl.load(table + position // BLOCK_SIZE, seen, 0).to(tl.int64)
        at = kv.lines + (block * BLOCK_SIZE + position % BLOCK_SIZE)[:, None] * (ROPE + V_DIM)
        scale_at = kv.scales + block * (2 * BLOCK_SIZE) + position % BLOCK_SIZE
        if not SELECTED:
            block = load_blocks(table, position + TILE, end, BLOCK_SIZE)
        values = tl.load(at + ROPE + v[None, :], seen[:, None] & (v < V_DIM)[None, :], 0.0).to(q.dtype.element_ty)
        keys = tl.load(at + r[None, :], seen[:, None] & (r < ROPE)[None, :], 0.0).to(q.dtype.element_ty)
        score = tl.dot(q_value, tl.trans(values), input_precision="ieee")
        if LARGEST > 0:
            value_scale = tl.load(scale_at + BLOCK_SIZE, seen, 0.0)[None, :]
            score *= value_scale
            score += tl.dot(q_rope, tl.trans(keys), input_precision="ieee") * tl.load(scale_at, seen, 0.0)[None, :]
        else:
            score = tl.dot(q_rope, tl.trans(keys), score, input_precision="ieee")
        score = tl.where(seen[None, :] & (position[None, :] <= own[:, None]), score * scale, -float("inf"))
        highest, weight, shrink, total = soften(score, highest, total)
        if LARGEST > 0:
            weight *= value_scale
        mix = tl.dot(weight.to(q.dtype.element_ty), values, mix * shrink[:, None], input_precision="ieee")
    return highest, total, mix


@triton.jit
def join_splits(split_kv, first, count, head, there, wanted, SHAPE: tl.constexpr):
    V_DIM: tl.constexpr = SHAPE.v_dim
    v = tl.arange(0, SHAPE.block_v)
    highest, total, mix = no_scores(SHAPE.queries, SHAPE.block_v)
    for index in tl.range(0, count):
        line = (first + index).to(tl.int64) * SHAPE.heads + head
        highest_there = tl.load(split_kv.stats + line * 2, there, -1e30, cache_modifier=".cg")
        total_there = tl.load(split_kv.stats + line * 2 + 1, there, 0.0, cache_modifier=".cg")
        at = split_kv.outputs + line[:, None] * V_DIM + v[None, :]
        mix_there = tl.load(at, wanted, 0.0, cache_modifier=".cg")
        peak = tl.maximum(highest, highest_there)
        shrink, factor = tl.exp2(highest - peak), tl.exp2(highest_there - peak)
        total = total * shrink + total_there * factor
        mix = mix * shrink[:, None] + mix_there * factor[:, None]
        highest = peak
    return total, mix


@triton.jit
def _mla_decode(
    q,
    kv,
    splits,
    out,
    split_kv,
    scale,
    SHAPE: tl.constexpr,
    LARGEST: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Contexts of more than TOP_K positions are left to `_mla_selected`."""
    let_next_start(PDL)
    HEADS: tl.constexpr = SHAPE.heads
    V_DIM: tl.constexpr = SHAPE.v_dim
    group, split = tl.program_id(0), tl.program_id(1)
    token = tl.load(splits + split * 8).to(tl.int64)
    if token < 0:
        return
    row, begin, end, length, count, first = load_split(splits, split)
    if length > TOP_K:
        wait_for_previous(PDL)  # the next kernel relies on it
        return
    table = table_of(kv, row)
    head = group * SHAPE.queries + tl.arange(0, SHAPE.queries)
    there = head < HEADS
    v = tl.arange(0, SHAPE.block_v)
    wanted = there[:, None] & (v < V_DIM)[None, :]
    wait_for_previous(PDL)
    highest, total, mix = attend_mla(
        q, token * HEADS + head, head * 0 + end, there, kv, table, begin, end, scale, SHAPE, LARGEST
    )
    if count > 1:
        leave_split(split_kv, split.to(tl.int64) * HEADS + head, v, mix, highest, total, there, wanted, V_DIM)
        arrivals = split_kv.arrived + first * tl.num_programs(0) + group
        if tl.atomic_add(arrivals, 1, sem="acq_rel") != count - 1:
            return
        tl.store(arrivals, 0)
        total, mix = join_splits(split_kv, first, count, head, there, wanted, SHAPE)
    store_mix(out, token * HEADS + head, v, mix, total, wanted, V_DIM)


@triton.jit
def _mla_prefill(
    q, kv, tiles, out, scale, SHAPE: tl.constexpr, LARGEST: tl.constexpr, TOP_K: tl.constexpr, PDL: tl.constexpr
):
    """Rows are pairs of token and head. Tokens that see more than TOP_K positions are left to `_mla_selected`."""
    let_next_start(PDL)
    HEADS: tl.constexpr = SHAPE.heads
    QUERIES: tl.constexpr = SHAPE.queries
    tile = tl.program_id(1)
    wait_for_previous(PDL)
    token = tl.load(tiles + tile * 5).to(tl.int64)
    if token < 0:
        return
    table, first, count = load_tile(kv, tiles, tile)
    pair = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    if tl.program_id(0) * QUERIES >= count * HEADS:
        return
    if first + tl.program_id(0) * QUERIES // HEADS >= TOP_K:
        return
    last = tl.minimum((tl.program_id(0) * QUERIES + QUERIES - 1) // HEADS, count - 1)  # token of this program
    there = pair < count * HEADS
    row, own, end = token * HEADS + pair, first + pair // HEADS, first + last + 1
    _, total, mix = attend_mla(q, row, own, there, kv, table, 0, end, scale, SHAPE, LARGEST)
    v = tl.arange(0, SHAPE.block_v)
    store_mix(out, row, v, mix, total, there[:, None] & (v < SHAPE.v_dim)[None, :], SHAPE.v_dim)


@triton.jit
def _mla_selected(
    q,
    kv,
    work,
    out,
    scale,
    selected,
    SHAPE: tl.constexpr,
    LARGEST: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    HEADS: tl.constexpr = SHAPE.heads
    V_DIM: tl.constexpr = SHAPE.v_dim
    wait_for_previous(PDL)
    token, row, own = load_work(work, tl.program_id(1), tl.program_id(2), COLUMNS)
    if token < 0:
        return
    if own < TOP_K:
        return
    head = tl.program_id(0) * SHAPE.queries + tl.arange(0, SHAPE.queries)
    there, lines = head < HEADS, token * HEADS + head
    _, total, mix = attend_mla(
        q,
        lines,
        head * 0 + own,
        there,
        kv,
        table_of(kv, row),
        0,
        TOP_K,
        scale,
        SHAPE,
        LARGEST,
        selected + token * TOP_K,
        SELECTED=True,
    )
    v = tl.arange(0, SHAPE.block_v)
    store_mix(out, lines, v, mix, total, there[:, None] & (v < V_DIM)[None, :], V_DIM)


def mla_decode(
    q: Any,
    cache: Any,
    splits: Any,
    tables: Any,
    header: Any,
    out: Any,
    split_kv: SplitKV,
    v_dim: int,
    scale: float,
    scales: Any | None = None,
    top_k: int = ALL,
    *,
    tiling: MlaTiling,
) -> None:
    """Attends as `decode_attention` does, with queries that are rotated and keys that are stored. Tokens that see more
    than `top_k` positions are left to `mla_selected`."""
    shape, options = tiled(tiling, cache, scales, out, v_dim)
    kv = PagedKv(cache, splits if scales is None else scales, tables, header)
    grid = (triton.cdiv(shape.heads, shape.queries), len(splits))
    _mla_decode[grid](q, kv, splits, out, split_kv, scale * LOG2E, SHAPE=shape, TOP_K=top_k, **options)


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
    top_k: int = ALL,
    *,
    tiling: MlaTiling,
) -> None:
    """Attends as `prefill_attention` does, with tiles that hold at most tokens_per_tile(heads). Tokens that see more
    than `top_k` positions are left to `mla_selected`."""
    shape, options = tiled(tiling, cache, scales, out, v_dim)
    kv = PagedKv(cache, tiles if scales is None else scales, tables, header)
    grid = (triton.cdiv(tokens_per_tile(shape.heads) * shape.heads, shape.queries), len(tiles))
    _mla_prefill[grid](q, kv, tiles, out, scale * LOG2E, SHAPE=shape, TOP_K=top_k, **options)


def mla_selected(
    q: Any,
    cache: Any,
    work: Any,
    tables: Any,
    header: Any,
    out: Any,
    v_dim: int,
    scale: float,
    scales: Any | None,
    selected: Any,
    tokens: int,
    *,
    tiling: MlaTiling,
) -> None:
    """Attends to `selected` [T, top_k] positions, for splits [P, 8] or tiles [Q, 5] of at most `tokens` tokens."""
    shape, options = tiled(tiling, cache, scales, out, v_dim)
    kv = PagedKv(cache, work if scales is None else scales, tables, header)
    grid = (triton.cdiv(shape.heads, shape.queries), len(work), tokens)
    constants = {"SHAPE": shape, "COLUMNS": work.shape[1], "TOP_K": selected.shape[1]}
    _mla_selected[grid](q, kv, work, out, scale * LOG2E, selected, **constants, **options)


def tiled(tiling: MlaTiling, cache: Any, scales: Any | None, out: Any, v_dim: int) -> tuple[MlaShape, dict[str, Any]]:
    queries, tile, warps, stages = tiling
    rope_dims = cache.shape[2] - v_dim
    shape = MlaShape(
        out.shape[1] // v_dim,
        rope_dims,
        v_dim,
        cache.shape[1],
        queries,
        max(triton.next_power_of_2(rope_dims), 16),
        max(triton.next_power_of_2(v_dim), 16),
        tile,
    )
    return shape, {"LARGEST": largest_of(cache, scales), **launch_options(warps, stages)}
