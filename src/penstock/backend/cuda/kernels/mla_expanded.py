"""Multi-head latent attention (MLA) of runs of tokens in its expanded form: latents are projected to keys and values of
all heads, in pieces of a step's contexts (mla_expansion.py), and attention continues from piece to piece.

Heads have keys and values of their own here, so a program's rows are the tokens of one head. They share the dimensions
that RoPE rotates, which are not projected.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.contexts import BLOCK, CONTEXT_COLUMNS
from penstock.backend.cuda.kernels.kv8 import largest_of
from penstock.backend.cuda.kernels.kv_tile import LOG2E, PagedKv, no_scores, soften, store_mix, table_of
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.mla_expansion import TILE_TOKENS, MlaDims

WIDTH = 64  # latent dimensions projected at a time


class ExpandedKv(NamedTuple):
    """Holds the keys and values of a piece."""

    k: Any  # [heads, room, nope]
    v: Any  # [heads, room, v_dim]
    rope: Any  # [room, rope], the dimensions of keys that all heads share

    @classmethod
    def within(cls, memory: Any, dims: MlaDims, room: int) -> ExpandedKv:
        keys, values, rope = room * dims.heads * dims.nope, room * dims.heads * dims.v_dim, room * dims.rope
        return cls(
            memory[:keys].view(dims.heads, room, dims.nope),
            memory[keys : keys + values].view(dims.heads, room, dims.v_dim),
            memory[keys + values : keys + values + rope].view(room, dims.rope),
        )


class Carry(NamedTuple):
    """Holds the results of tokens in earlier pieces."""

    mix: Any  # [T, heads, v_dim], of 32 bits
    stats: Any  # [T, heads, 2] the highest score, and the sum of weights

    @classmethod
    def within(cls, memory: Any, dims: MlaDims, tokens: int) -> Carry:
        """Returns room for `tokens` tokens at the beginning of a flat tensor of 32 bits."""
        lines = tokens * dims.heads
        mix, stats = memory[: lines * dims.v_dim], memory[lines * dims.v_dim : lines * (dims.v_dim + 2)]
        return cls(mix.view(tokens, dims.heads, dims.v_dim), stats.view(tokens, dims.heads, 2))


class ExpandedShape(NamedTuple):
    """Holds the constants of a launch."""

    dims: MlaDims
    room: int
    block_n: int  # dims.nope rounded up to a power of two
    block_r: int
    block_v: int


@triton.jit
def _expand_latents(
    kv,
    blocks,
    k_b,
    v_b,
    expanded,
    SHAPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    POSITIONS: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    DIMS: tl.constexpr = SHAPE.dims
    BLOCK_N: tl.constexpr = SHAPE.block_n
    BLOCK_V: tl.constexpr = SHAPE.block_v
    DTYPE: tl.constexpr = k_b.dtype.element_ty
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_previous(PDL)
    row, first = tl.load(blocks + block * STRIDE), tl.load(blocks + block * STRIDE + 1)
    if row < 0:
        return
    index = tl.arange(0, POSITIONS)
    there = index < tl.load(blocks + block * STRIDE + 2)
    position = first + index
    page = tl.load(table_of(kv, row) + position // BLOCK_SIZE, there, 0).to(tl.int64)
    source = kv.lines + (page * BLOCK_SIZE + position % BLOCK_SIZE)[:, None] * (DIMS.rope + DIMS.rank)
    n, v, r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V), tl.arange(0, SHAPE.block_r)
    keys = tl.zeros([POSITIONS, BLOCK_N], tl.float32)
    values = tl.zeros([POSITIONS, BLOCK_V], tl.float32)
    for start in tl.range(0, DIMS.rank, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < DIMS.rank
        latents = tl.load(source + DIMS.rope + column[None, :], there[:, None] & inside[None, :], 0.0).to(DTYPE)
        to_keys = k_b + (head * DIMS.rank + column)[:, None] * DIMS.nope + n[None, :]
        to_keys = tl.load(to_keys, inside[:, None] & (n < DIMS.nope)[None, :], 0.0)
        to_values = v_b + (head * DIMS.v_dim + v)[:, None] * DIMS.rank + column[None, :]
        to_values = tl.load(to_values, (v < DIMS.v_dim)[:, None] & inside[None, :], 0.0)
        keys = tl.dot(latents, to_keys, keys, input_precision="ieee")
        values = tl.dot(latents, tl.trans(to_values), values, input_precision="ieee")
    scales = kv.scales + page * (2 * BLOCK_SIZE) + position % BLOCK_SIZE
    if LARGEST > 0:
        scale = tl.load(scales + BLOCK_SIZE, there, 0.0)[:, None]
        keys, values = keys * scale, values * scale
    place = block * POSITIONS + index
    line = head * SHAPE.room + place
    tl.store(expanded.k + line[:, None] * DIMS.nope + n[None, :], keys.to(DTYPE), (n < DIMS.nope)[None, :])
    tl.store(expanded.v + line[:, None] * DIMS.v_dim + v[None, :], values.to(DTYPE), (v < DIMS.v_dim)[None, :])
    if head == 0:
        rope = tl.load(source + r[None, :], there[:, None] & (r < DIMS.rope)[None, :], 0.0).to(DTYPE)
        if LARGEST > 0:
            rope = (rope.to(tl.float32) * tl.load(scales, there, 0.0)[:, None]).to(DTYPE)
        tl.store(expanded.rope + place[:, None] * DIMS.rope + r[None, :], rope, (r < DIMS.rope)[None, :])


@triton.jit
def _fold(
    queries,
    expanded,
    start,
    head,
    own,
    high,
    scale,
    softmax,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    DIMS: tl.constexpr = SHAPE.dims
    q_nope, q_rope = queries
    highest, total, mix = softmax
    n, v, r = tl.arange(0, SHAPE.block_n), tl.arange(0, SHAPE.block_v), tl.arange(0, SHAPE.block_r)
    place = start + tl.arange(0, TILE)
    line = (head * SHAPE.room + place)[:, None]
    in_keys, in_values, in_rope = (n < DIMS.nope)[None, :], (v < DIMS.v_dim)[None, :], (r < DIMS.rope)[None, :]
    if MASKED:
        seen = (place < high)[:, None]
        in_keys, in_values, in_rope = in_keys & seen, in_values & seen, in_rope & seen
    keys = tl.load(expanded.k + line * DIMS.nope + n[None, :], in_keys, 0.0)
    rope = tl.load(expanded.rope + place[:, None] * DIMS.rope + r[None, :], in_rope, 0.0)
    values = tl.load(expanded.v + line * DIMS.v_dim + v[None, :], in_values, 0.0)
    score = tl.dot(q_nope, tl.trans(keys), input_precision="ieee")
    score = tl.dot(q_rope, tl.trans(rope), score, input_precision="ieee") * scale
    if MASKED:
        score = tl.where((place < high)[None, :] & (place[None, :] <= own[:, None]), score, -float("inf"))
    peak, weight, shrink, total = soften(score, highest, total)
    mix = tl.dot(weight.to(values.dtype), values, mix * shrink[:, None], input_precision="ieee")
    return peak, total, mix


@triton.jit
def _mla_expanded(
    q,
    expanded,
    tiles,
    starts,
    out,
    carry,
    begin,
    scale,
    SHAPE: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attends with one head of a tile's tokens to what the piece that starts at `begin` has of their context. All
    positions count from the start of the piece."""
    let_next_start(PDL)
    DIMS: tl.constexpr = SHAPE.dims
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_previous(PDL)
    token = tl.load(tiles + tile * 5).to(tl.int64)
    if token < 0:
        return
    first, count = tl.load(tiles + tile * 5 + 2), tl.load(tiles + tile * 5 + 3)
    context = tl.load(starts + tile) - begin
    low, high = tl.maximum(context, 0), tl.minimum(context + first + count, SHAPE.room)
    if low >= high:
        return
    index = tl.arange(0, TOKENS)
    own, there = context + first + index, index < count
    n, v, r = tl.arange(0, SHAPE.block_n), tl.arange(0, SHAPE.block_v), tl.arange(0, SHAPE.block_r)
    line = (token + index) * DIMS.heads + head
    source = q + line[:, None] * (DIMS.nope + DIMS.rope)
    q_nope = tl.load(source + n[None, :], there[:, None] & (n < DIMS.nope)[None, :], 0.0)
    q_rope = tl.load(source + DIMS.nope + r[None, :], there[:, None] & (r < DIMS.rope)[None, :], 0.0)
    wanted = there[:, None] & (v < DIMS.v_dim)[None, :]
    at = carry.mix + line[:, None] * DIMS.v_dim + v[None, :]
    highest, total, mix = no_scores(TOKENS, SHAPE.block_v)
    if context < 0:
        highest = tl.load(carry.stats + line * 2, there, -1e30)
        total = tl.load(carry.stats + line * 2 + 1, there, 0.0)
        mix = tl.load(at, wanted, 0.0)
    seen_by_all = tl.maximum(tl.minimum(context + first + 1, high) - low, 0)
    whole = low + seen_by_all // TILE * TILE
    softmax = highest, total, mix
    for start in tl.range(low, whole, TILE):
        softmax = _fold((q_nope, q_rope), expanded, start, head, own, high, scale, softmax, SHAPE, TILE, False)
    for start in tl.range(whole, high, TILE):
        softmax = _fold((q_nope, q_rope), expanded, start, head, own, high, scale, softmax, SHAPE, TILE, True)
    highest, total, mix = softmax
    if context + first + count > SHAPE.room:
        tl.store(carry.stats + line * 2, highest, there)
        tl.store(carry.stats + line * 2 + 1, total, there)
        tl.store(at, mix, wanted)
    else:
        store_mix(out, line, v, mix, total, wanted, DIMS.v_dim)


def expand_latents(
    cache: Any,
    blocks: Any,
    tables: Any,
    header: Any,
    k_b: Any,
    v_b: Any,
    expanded: ExpandedKv,
    scales: Any | None = None,
    *,
    stages: int,
) -> None:
    """Expands a piece: the `blocks` [B, CONTEXT_COLUMNS] of contexts, which a row of -1 leaves out."""
    kv, shape = PagedKv(cache, blocks if scales is None else scales, tables, header), shape_of(expanded)
    _expand_latents[(len(blocks), shape.dims.heads)](
        *(kv, blocks, k_b, v_b, expanded),
        SHAPE=shape._replace(dims=shape.dims._replace(rank=v_b.shape[2])),
        BLOCK_SIZE=cache.shape[1],
        LARGEST=largest_of(cache, scales),
        POSITIONS=BLOCK,
        STRIDE=CONTEXT_COLUMNS,
        CHUNK=WIDTH,
        **launch_options(8, stages),
    )


def mla_expanded(
    q: Any,
    expanded: ExpandedKv,
    tiles: Any,
    starts: Any,
    out: Any,
    carry: Carry,
    begin: int,
    scale: float,
    *,
    tiling: tuple[int, int, int],  # positions at a time, warps, stages
) -> None:
    """Attends with tiles [Q, 5] of at most TILE_TOKENS tokens, as `prefill_attention` has them, to a piece of their
    contexts, which begin at `starts` [Q]; the piece begins at `begin`. q [T, heads * (nope + rope)] is rotated. The
    results of a context's last piece go to `out` [T, heads * v_dim], others to `carry`."""
    shape = shape_of(expanded)
    tile, warps, stages = tiling
    _mla_expanded[(len(tiles), shape.dims.heads)](
        *(q, expanded, tiles, starts, out, carry, begin, scale * LOG2E),
        SHAPE=shape,
        TOKENS=TILE_TOKENS,
        TILE=tile,
        **launch_options(warps, stages),
    )


def shape_of(expanded: ExpandedKv) -> ExpandedShape:
    heads, room, nope = expanded.k.shape
    dims = MlaDims(heads, nope, expanded.rope.shape[1], 0, expanded.v.shape[2])
    blocks = (max(triton.next_power_of_2(size), 16) for size in (dims.nope, dims.rope, dims.v_dim))
    return ExpandedShape(dims, room, *blocks)
