"""Turns q and k by their positions and writes k and v into the paged cache.

A cache is [blocks, 2, kv_heads, block_size, D]: keys, then values; a head's part of a block is contiguous. One of 8
bits has scales beside it, [blocks, 2, kv_heads, block_size] (kv.py).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.kv8 import coded, scaling
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options

HEADS = 16  # of one program


@triton.jit
def angle_of(position, frequency):
    """In float32, but not before whole turns are taken off."""
    turns = position.to(tl.float64) * frequency * 0.15915494309189535  # over 2 pi
    return ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)


@triton.jit
def rotation_of(inv_freq, position, rope_scale, d, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, DIMS: tl.constexpr):
    """(cos, sin, other): x[d] turned is x[d] * cos + x[other] * sin. Of the pairs, TURNED are."""
    HALF: tl.constexpr = TURNED if TURNED > 0 else 1
    pair = d // 2 if INTERLEAVED else d % HALF
    is_left = d % 2 == 0 if INTERLEAVED else d < HALF
    angle = angle_of(position, tl.load(inv_freq + pair, d < 2 * TURNED, 0.0))
    cos, sin = tl.cos(angle) * rope_scale, tl.sin(angle) * rope_scale
    sin = tl.where(is_left, -sin, sin)
    other = tl.where(is_left, d + (1 if INTERLEAVED else HALF), d - (1 if INTERLEAVED else HALF))
    if 2 * TURNED < DIMS:
        cos = tl.where(d < 2 * TURNED, cos, 1.0)
        sin = tl.where(d < 2 * TURNED, sin, 0.0)
        other = tl.where(d < 2 * TURNED, other, d)
    return cos, sin, other


@triton.jit
def _rope_and_store(
    qkv,
    inv_freq,
    positions,
    places,
    cache,
    scales,
    rope_scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    real = pair < HALF
    frequency = tl.load(inv_freq + pair, pair < TURNED, 0.0)
    angle = angle_of(tl.load(positions + token), frequency)
    place = tl.load(places + token).to(tl.int64)
    if PDL:
        gdc_wait()
    stays = (head >= Q_HEADS + KV_HEADS)[:, None]
    left = pair * 2 if INTERLEAVED else pair
    right = pair * 2 + 1 if INTERLEAVED else pair + TURNED
    if TURNED < HALF:  # the others follow those that are turned, side by side
        stays = stays | (pair >= TURNED)[None, :]
        left = tl.where(pair < TURNED, left, pair * 2)
        right = tl.where(pair < TURNED, right, pair * 2 + 1)
    cos = tl.where(stays, 1.0, (tl.cos(angle) * rope_scale)[None, :])  # [HEADS, PAIRS]
    sin = tl.where(stays, 0.0, (tl.sin(angle) * rope_scale)[None, :])
    source = qkv + (token * (Q_HEADS + 2 * KV_HEADS) + head)[:, None] * (2 * HALF)
    inside = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & real[None, :]
    a = tl.load(source + left[None, :], inside, 0.0).to(tl.float32)
    b = tl.load(source + right[None, :], inside, 0.0).to(tl.float32)
    turned_a = (a * cos - b * sin).to(qkv.dtype.element_ty)
    turned_b = (b * cos + a * sin).to(qkv.dtype.element_ty)

    is_query = (head < Q_HEADS)[:, None]
    tl.store(source + left[None, :], turned_a, inside & is_query)
    tl.store(source + right[None, :], turned_b, inside & is_query)

    kv_head = tl.maximum(head - Q_HEADS, 0)  # keys first, then values
    row = (place // BLOCK_SIZE * (2 * KV_HEADS) + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE
    target = cache + row[:, None] * (2 * HALF)
    if SCALED:
        turned_a, turned_b = turned_a.to(tl.float32), turned_b.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(turned_a), tl.abs(turned_b)), 1)
        scale = tl.maximum(largest, 1e-12) / LARGEST
        tl.store(scales + row, scale, (head >= Q_HEADS) & (head < Q_HEADS + 2 * KV_HEADS))
        turned_a = coded(turned_a, scale[:, None], cache.dtype.element_ty, INTERPRET)
        turned_b = coded(turned_b, scale[:, None], cache.dtype.element_ty, INTERPRET)
    tl.store(target + left[None, :], turned_a.to(cache.dtype.element_ty), inside & ~is_query)
    tl.store(target + right[None, :], turned_b.to(cache.dtype.element_ty), inside & ~is_query)


def rope_and_store(
    qkv: Any,
    inv_freq: Any,
    rope_scale: float,
    turned: int,
    interleaved: bool,
    positions: Any,
    places: Any,
    cache: Any,
    scales: Any | None = None,
) -> None:
    """q is turned in place in qkv [T, q + k + v], as many pairs of each head as `turned` says; k and v go to `places`
    [T], counted in tokens from the cache's start."""
    kv_heads, block_size, dims = cache.shape[2:]
    tokens, width = qkv.shape
    heads = width // dims
    _rope_and_store[(tokens, triton.cdiv(heads, HEADS))](
        qkv,
        inv_freq,
        positions,
        places,
        cache,
        inv_freq if scales is None else scales,
        rope_scale,
        Q_HEADS=heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=dims // 2,
        TURNED=turned,
        BLOCK_SIZE=block_size,
        INTERLEAVED=interleaved,
        HEADS=HEADS,
        PAIRS=triton.next_power_of_2(dims // 2),
        **scaling(cache, scales),
        **options(),
    )
