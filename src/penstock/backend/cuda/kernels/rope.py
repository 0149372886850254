"""Rotary embedding (RoPE) of queries and keys, and the write of keys and values into the paged cache.

A cache is [blocks, 2, kv_heads, block_size, D]: keys, then values; a head's part of a block is contiguous. One of 8
bits also has scales, [blocks, 2, kv_heads, block_size] (kv8.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.kv8 import largest_of, quantize_kv, scale_of
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous

HEADS = 16  # per program


@triton.jit
def angle_of(position, frequency):
    """Returns position * frequency in float32, less the whole turns, which are taken off in float64."""
    turns = position.to(tl.float64) * frequency * 0.15915494309189535  # over 2 pi
    return ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)


@triton.jit
def rotation_of(
    inv_freq, position, rope_scale, d, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, DIMS: tl.constexpr
):
    """Returns (cos, sin, other): x[d] rotated is x[d] * cos + x[other] * sin. The first ROTATED pairs are rotated."""
    HALF: tl.constexpr = ROTATED if ROTATED > 0 else 1
    pair = d // 2 if INTERLEAVED else d % HALF
    is_left = d % 2 == 0 if INTERLEAVED else d < HALF
    angle = angle_of(position, tl.load(inv_freq + pair, d < 2 * ROTATED, 0.0))
    cos, sin = tl.cos(angle) * rope_scale, tl.sin(angle) * rope_scale
    sin = tl.where(is_left, -sin, sin)
    other = tl.where(is_left, d + (1 if INTERLEAVED else HALF), d - (1 if INTERLEAVED else HALF))
    if 2 * ROTATED < DIMS:
        cos = tl.where(d < 2 * ROTATED, cos, 1.0)
        sin = tl.where(d < 2 * ROTATED, sin, 0.0)
        other = tl.where(d < 2 * ROTATED, other, d)
    return cos, sin, other


@triton.jit
def rotate_pair(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


class RopeInputs(NamedTuple):
    """Says how tokens are rotated and where they go in the cache."""

    inv_freq: Any  # [pairs] float64
    positions: Any  # [T]
    places: Any  # [T] counted in tokens from the cache's start
    scale: float


class RopeConfig(NamedTuple):
    """Holds the constants of a launch."""

    q_heads: int
    kv_heads: int
    half: int  # half of a head's dimensions
    rotated: int  # pairs of each head
    block_size: int
    block_lines: int  # lines of the cache from block to block
    interleaved: bool
    heads: int  # per program
    pairs: int  # half rounded up to a power of two
    largest: float  # the cache type's maximum; 0: no scales


@triton.jit
def _rope_and_store(qkv, rope, cache, scales, CONFIG: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    Q_HEADS: tl.constexpr = CONFIG.q_heads
    KV_HEADS: tl.constexpr = CONFIG.kv_heads
    HALF: tl.constexpr = CONFIG.half
    ROTATED: tl.constexpr = CONFIG.rotated
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * CONFIG.heads + tl.arange(0, CONFIG.heads)
    pair = tl.arange(0, CONFIG.pairs)
    real = pair < HALF
    frequency = tl.load(rope.inv_freq + pair, pair < ROTATED, 0.0)
    angle = angle_of(tl.load(rope.positions + token), frequency)
    place = tl.load(rope.places + token).to(tl.int64)
    wait_for_previous(PDL)
    stays = (head >= Q_HEADS + KV_HEADS)[:, None]
    left = pair * 2 if CONFIG.interleaved else pair
    right = pair * 2 + 1 if CONFIG.interleaved else pair + ROTATED
    if ROTATED < HALF:  # the others follow those that are rotated, side by side
        stays = stays | (pair >= ROTATED)[None, :]
        left = tl.where(pair < ROTATED, left, pair * 2)
        right = tl.where(pair < ROTATED, right, pair * 2 + 1)
    cos = tl.where(stays, 1.0, (tl.cos(angle) * rope.scale)[None, :])  # [HEADS, PAIRS]
    sin = tl.where(stays, 0.0, (tl.sin(angle) * rope.scale)[None, :])
    source = qkv + (token * (Q_HEADS + 2 * KV_HEADS) + head)[:, None] * (2 * HALF)
    inside = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & real[None, :]
    a = tl.load(source + left[None, :], inside, 0.0).to(tl.float32)
    b = tl.load(source + right[None, :], inside, 0.0).to(tl.float32)
    a, b = rotate_pair(a, b, cos, sin)
    a, b = a.to(qkv.dtype.element_ty), b.to(qkv.dtype.element_ty)

    is_query = (head < Q_HEADS)[:, None]
    tl.store(source + left[None, :], a, inside & is_query)
    tl.store(source + right[None, :], b, inside & is_query)

    kv_head = tl.maximum(head - Q_HEADS, 0)  # keys first, then values
    row = place // CONFIG.block_size * CONFIG.block_lines + kv_head * CONFIG.block_size + place % CONFIG.block_size
    target = cache + row[:, None] * (2 * HALF)
    if CONFIG.largest > 0:
        a, b = a.to(tl.float32), b.to(tl.float32)
        scale = scale_of(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1), CONFIG.largest)
        tl.store(scales + row, scale, (head >= Q_HEADS) & (head < Q_HEADS + 2 * KV_HEADS))
        a = quantize_kv(a, scale[:, None], cache.dtype.element_ty)
        b = quantize_kv(b, scale[:, None], cache.dtype.element_ty)
    tl.store(target + left[None, :], a.to(cache.dtype.element_ty), inside & ~is_query)
    tl.store(target + right[None, :], b.to(cache.dtype.element_ty), inside & ~is_query)


def rope_and_store(
    qkv: Any,
    inv_freq: Any,
    rope_scale: float,
    rotated: int,
    interleaved: bool,
    positions: Any,
    places: Any,
    cache: Any,
    scales: Any | None = None,
    stores: bool = True,
) -> None:
    """Rotates q in place in qkv [T, q + k + v], the first `rotated` pairs of each head, and stores k and v at `places`
    [T], counted in tokens from the cache's start. Unless it `stores`, qkv is only q."""
    kv_heads, block_size, dims = cache.shape[2:]
    kv_heads = kv_heads if stores else 0
    tokens, width = qkv.shape
    heads = width // dims
    config = RopeConfig(
        heads - 2 * kv_heads,
        kv_heads,
        dims // 2,
        rotated,
        block_size,
        cache.stride(0) // dims,
        interleaved,
        HEADS,
        triton.next_power_of_2(dims // 2),
        largest_of(cache, scales),
    )
    rope = RopeInputs(inv_freq, positions, places, rope_scale)
    vector, grid = inv_freq if scales is None else scales, (tokens, triton.cdiv(heads, HEADS))
    _rope_and_store[grid](qkv, rope, cache, vector, CONFIG=config, **launch_options())
