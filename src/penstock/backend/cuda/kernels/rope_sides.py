"""Rotary embedding (RoPE) of queries and keys, and the write of keys and values into a cache of two sides.

Where keys have 4 bits, queries and keys get a Hadamard transform after RoPE: their products stay the same, and large
values in a few dimensions of keys are spread over all. It is a product with a matrix of signs, made where it is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.kv_sides import (
    INT4,
    KvKinds,
    heads_of,
    key_side,
    kinds_of,
    paged,
    store_lines,
    value_side,
)
from penstock.backend.cuda.kernels.kv_tile import KvShape, line_of
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.rope import RopeInputs, rotation_of

HEADS = 16  # per program: the minimum of tensor cores
CHUNK = 64  # dimensions that are transformed at a time


class SidesConfig(NamedTuple):
    """Holds the constants of a launch."""

    shape: KvShape
    kinds: KvKinds
    rotated: int  # pairs of each head
    interleaved: bool
    run: int  # dimensions that are transformed together; 0: none are
    norm: float  # the transform's
    chunk: int
    heads: int  # per program
    q_gain: bool  # rotated queries are multiplied by a vector as wide as a head


@triton.jit
def signs(d, e, RUN: tl.constexpr):
    """Returns rows `d` and columns `e` of the transform's matrix, but for its norm."""
    bits = d[:, None] & e[None, :] & (RUN - 1)
    bits ^= bits >> 8
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return tl.where(d[:, None] // RUN == e[None, :] // RUN, 1 - 2 * (bits & 1), 0)


@triton.jit
def load_rotated(source, there, rope, position, d, q_gain, IS_QUERY: tl.constexpr, CONFIG: tl.constexpr):
    """Returns dimensions `d` of heads after RoPE, and of queries after their gain, in the type of activations."""
    DIMS: tl.constexpr = CONFIG.shape.dims
    cos, sin, other = rotation_of(rope.inv_freq, position, rope.scale, d, CONFIG.rotated, CONFIG.interleaved, DIMS)
    inside = there[:, None] & (d < DIMS)[None, :]
    x = tl.load(source[:, None] + d[None, :], inside, 0.0).to(tl.float32) * cos[None, :]
    x += tl.load(source[:, None] + other[None, :], inside, 0.0).to(tl.float32) * sin[None, :]
    DTYPE: tl.constexpr = source.dtype.element_ty
    if IS_QUERY and CONFIG.q_gain:
        x = x.to(DTYPE).to(tl.float32) * tl.load(q_gain + d, d < DIMS, 0.0)[None, :]
    return x.to(DTYPE)


@triton.jit
def transformed(source, there, rope, position, q_gain, IS_QUERY: tl.constexpr, CONFIG: tl.constexpr):
    BLOCK_D: tl.constexpr = CONFIG.shape.block_d
    HEADS: tl.constexpr = CONFIG.heads
    CHUNK: tl.constexpr = CONFIG.chunk
    e = tl.arange(0, BLOCK_D)
    if CONFIG.run:
        out = tl.zeros([HEADS, BLOCK_D], tl.float32)
        for first in tl.static_range(0, BLOCK_D, CHUNK):
            d = first + tl.arange(0, CHUNK)
            x = load_rotated(source, there, rope, position, d, q_gain, IS_QUERY, CONFIG)
            out = tl.dot(x, signs(d, e, CONFIG.run).to(x.dtype), out, input_precision="ieee")
        return out * CONFIG.norm
    else:
        return load_rotated(source, there, rope, position, e, q_gain, IS_QUERY, CONFIG).to(tl.float32)


@triton.jit
def _rope_and_store_sides(qkv, rope, kv, q_gain, CONFIG: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    SHAPE: tl.constexpr = CONFIG.shape
    KINDS: tl.constexpr = CONFIG.kinds
    DIMS: tl.constexpr = SHAPE.dims
    QUERY_PARTS: tl.constexpr = (SHAPE.heads + CONFIG.heads - 1) // CONFIG.heads
    KEY_PARTS: tl.constexpr = (SHAPE.kv_heads + CONFIG.heads - 1) // CONFIG.heads
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # queries, then keys, then values
    position, place = tl.load(rope.positions + token), tl.load(rope.places + token).to(tl.int64)
    wait_for_previous(PDL)
    row = qkv + token * SHAPE.row_heads * DIMS
    d = tl.arange(0, SHAPE.block_d)
    if part < QUERY_PARTS:
        head = part * CONFIG.heads + tl.arange(0, CONFIG.heads)
        there = head < SHAPE.heads
        q = transformed(row + head * DIMS, there, rope, position, q_gain, True, CONFIG)
        tl.debug_barrier()  # all is read before anything is written
        inside = there[:, None] & (d < DIMS)[None, :]
        tl.store((row + head * DIMS)[:, None] + d[None, :], q.to(qkv.dtype.element_ty), inside)
    elif part < QUERY_PARTS + KEY_PARTS:
        head = (part - QUERY_PARTS) * CONFIG.heads + tl.arange(0, CONFIG.heads)
        there = head < SHAPE.kv_heads
        key = transformed(row + (SHAPE.heads + head) * DIMS, there, rope, position, q_gain, False, CONFIG)
        line = line_of(place // SHAPE.block_size, place, head, SHAPE)
        store_lines(key_side(kv, SHAPE, KINDS), line, key, there, SHAPE, KINDS.keys)
    else:
        head = (part - QUERY_PARTS - KEY_PARTS) * CONFIG.heads + tl.arange(0, CONFIG.heads)
        there = head < SHAPE.kv_heads
        source = row + (SHAPE.heads + SHAPE.kv_heads + head) * DIMS
        value = tl.load(source[:, None] + d[None, :], there[:, None] & (d < DIMS)[None, :], 0.0).to(tl.float32)
        line = line_of(place // SHAPE.block_size, place, head, SHAPE)
        store_lines(value_side(kv, SHAPE, KINDS), line, value, there, SHAPE, KINDS.values)


def rope_and_store_sides(
    qkv: Any,
    inv_freq: Any,
    rope_scale: float,
    rotated: int,
    interleaved: bool,
    positions: Any,
    places: Any,
    cache: tuple[Any, Any],
    scales: tuple[Any, Any] | None,
    q_width: int,
    stores: bool = True,
    q_gain: Any | None = None,
) -> None:
    """Rotates q in place in qkv [T, q + k + v], the first `rotated` pairs of each head, and stores k and v at `places`
    [T], counted in tokens from the cache's start. Unless it `stores`, qkv is only q. Queries are then ready for
    attention: they have their gain, and the transform of keys."""
    shape, kinds = heads_of(cache, qkv, qkv[:, :q_width]), kinds_of(cache, scales)
    run = shape.dims & -shape.dims if kinds.keys == INT4.value else 0
    parts = triton.cdiv(shape.heads, HEADS) + (2 * triton.cdiv(shape.kv_heads, HEADS) if stores else 0)
    _rope_and_store_sides[(len(qkv), parts)](
        qkv,
        RopeInputs(inv_freq, positions, places, rope_scale),
        paged(cache, scales, positions, positions),
        inv_freq if q_gain is None else q_gain,
        CONFIG=SidesConfig(
            shape,
            kinds,
            rotated,
            interleaved,
            run,
            max(run, 1) ** -0.5,
            min(shape.block_d, CHUNK),
            HEADS,
            q_gain is not None,
        ),
        **launch_options(),
    )
