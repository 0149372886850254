"""Keys and values as two sides of a cache, which attention reads by one name in all formats.

Both sides of a cache in one format of 8 or 16 bits lie in one tensor (kv_tile.py). Else each has a tensor of its own:
[blocks, kv_heads, block_size, bytes or values of a line]. A line of 4 bits has D / 2 bytes: byte i holds the codes of
dimensions 2 * i and 2 * i + 1 in its low and its high half, both 8 too high. It has a float16 scale for every 32
dimensions. Keys of 4 bits are stored after a Hadamard transform (backend/kv_formats.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backend.cuda.kernels.kv8 import largest_of, quantize_kv, scale_of
from penstock.backend.cuda.kernels.kv_tile import KvShape, PagedKv, shape_of
from penstock.backend.kv_formats import GROUP

INT4 = tl.constexpr(8.0)  # the largest code of 4 bits, which also marks them
RUN = tl.constexpr(GROUP)


class PagedSides(NamedTuple):
    """Holds the two sides of a layer's cache and the block tables that say where each row's positions are."""

    key_lines: Any
    value_lines: Any
    key_scales: Any  # read only where a side has fewer than 16 bits
    value_scales: Any
    tables: Any
    header: Any  # its first number is the width of `tables`


class KvKinds(NamedTuple):
    """Holds the largest code of keys and of values; 0: they have no scales."""

    keys: float
    values: float
    apart: bool  # in tensors of their own


def is_apart(cache: Any) -> bool:
    return isinstance(cache, tuple)


def kinds_of(cache: Any, scales: Any | None) -> KvKinds:
    if not is_apart(cache):
        largest = largest_of(cache, scales)
        return KvKinds(largest, largest, False)
    keys, values = (
        INT4.value if side.dtype == torch.uint8 else largest_of(side, by)
        for side, by in zip(cache, scales or (None, None), strict=True)
    )
    return KvKinds(keys, values, True)


def paged(cache: Any, scales: Any | None, tables: Any, header: Any) -> PagedKv | PagedSides:
    """Returns a cache as kernels take it, with the tables instead of missing scales."""
    if not is_apart(cache):
        return PagedKv(cache, tables if scales is None else scales, tables, header)
    key_scales, value_scales = (tables if each is None else each for each in scales or (None, None))
    keys, values = cache
    return PagedSides(keys, values, key_scales, value_scales, tables, header)


def heads_of(cache: Any, qkv: Any, out: Any) -> KvShape:
    if not is_apart(cache):
        return shape_of(cache, qkv, out)
    kv_heads, block_size, width = cache[0].shape[1:]
    dims = 2 * width if cache[0].dtype == torch.uint8 else width
    heads, block_d = out.shape[1] // dims, max(triton.next_power_of_2(dims), 16)
    return KvShape(kv_heads, heads // kv_heads, dims, block_size, block_d, kv_heads * block_size, qkv.shape[1] // dims)


@triton.jit
def key_side(kv, SHAPE: tl.constexpr, KINDS: tl.constexpr):
    if KINDS.apart:
        return kv.key_lines, kv.key_scales
    else:
        return kv.lines, kv.scales


@triton.jit
def value_side(kv, SHAPE: tl.constexpr, KINDS: tl.constexpr):
    if KINDS.apart:
        return kv.value_lines, kv.value_scales
    else:
        return kv.lines + SHAPE.apart * SHAPE.dims, kv.scales + SHAPE.apart


@triton.jit
def load_lines(side, line, d, inside, SHAPE: tl.constexpr, LARGEST: tl.constexpr):
    """Returns the codes of lines [TILE], or their values where they have 4 or 16 bits: [TILE, BLOCK_D]."""
    lines, scales = side
    if LARGEST == INT4:
        return load_nibbles(lines, scales, line, inside, SHAPE)
    else:
        return tl.load(lines + line[:, None] * SHAPE.dims + d[None, :], inside, 0.0)


@triton.jit
def load_nibbles(lines, scales, line, inside, SHAPE: tl.constexpr):
    """Returns the values of lines [TILE] of 4 bits: [TILE, BLOCK_D]. `inside` is [TILE or 1, BLOCK_D]."""
    TILE: tl.constexpr = line.shape[0]
    ROWS: tl.constexpr = inside.shape[0]
    GROUPS: tl.constexpr = SHAPE.block_d // RUN
    byte = tl.arange(0, SHAPE.block_d // 2)
    group = tl.arange(0, GROUPS)
    seen = tl.max(tl.reshape(inside.to(tl.int32), [ROWS, GROUPS, RUN]), 2)  # [ROWS, GROUPS]
    seen_bytes = tl.max(tl.reshape(inside.to(tl.int32), [ROWS, SHAPE.block_d // 2, 2]), 2)
    codes = tl.load(lines + line[:, None] * (SHAPE.dims // 2) + byte[None, :], seen_bytes > 0, 0).to(tl.int32)
    by = tl.load(scales + line[:, None] * (SHAPE.dims // RUN) + group[None, :], seen > 0, 0.0).to(tl.float32)
    values = tl.join((codes & 15) - 8, (codes >> 4) - 8).to(tl.float32)
    return tl.reshape(tl.reshape(values, [TILE, GROUPS, RUN]) * by[:, :, None], [TILE, SHAPE.block_d])


@triton.jit
def store_lines(side, line, values, there, SHAPE: tl.constexpr, LARGEST: tl.constexpr):
    lines, scales = side
    d = tl.arange(0, SHAPE.block_d)
    inside = there[:, None] & (d < SHAPE.dims)[None, :]
    DTYPE: tl.constexpr = lines.dtype.element_ty
    if LARGEST == INT4:
        store_nibbles(lines, scales, line, values, there, SHAPE)
    elif LARGEST > 0:
        scale = scale_of(tl.max(tl.abs(values), 1), LARGEST)
        tl.store(scales + line, scale, there)
        tl.store(lines + line[:, None] * SHAPE.dims + d[None, :], quantize_kv(values, scale[:, None], DTYPE), inside)
    else:
        tl.store(lines + line[:, None] * SHAPE.dims + d[None, :], values.to(DTYPE), inside)


@triton.jit
def store_nibbles(lines, scales, line, values, there, SHAPE: tl.constexpr):
    """Stores values [N, BLOCK_D] as lines [N] of 4 bits. The largest of a group, by magnitude, has the code -8."""
    N: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = SHAPE.block_d // RUN
    HALF: tl.constexpr = SHAPE.block_d // 2
    group = tl.arange(0, GROUPS)
    byte = tl.arange(0, HALF)
    values = tl.reshape(values, [N, GROUPS, RUN])
    most, least = tl.max(values, 2), tl.min(values, 2)
    wanted = tl.where(-least >= most, least, most) * -0.125
    scale = tl.minimum(tl.maximum(wanted, -65504.0), 65504.0).to(tl.float16)
    inside = there[:, None] & (group < SHAPE.dims // RUN)[None, :]
    tl.store(scales + line[:, None] * (SHAPE.dims // RUN) + group[None, :], scale, inside)
    by = scale.to(tl.float32)
    codes = values / tl.where(by == 0.0, 1.0, by)[:, :, None]
    codes = tl.minimum(tl.maximum(tl.floor(codes + 0.5), -8.0), 7.0)
    codes = tl.where((by == 0.0)[:, :, None], 0.0, codes).to(tl.int32) + 8
    low, high = tl.split(tl.reshape(codes, [N, HALF, 2]))
    inside = there[:, None] & (byte < SHAPE.dims // 2)[None, :]
    tl.store(lines + line[:, None] * (SHAPE.dims // 2) + byte[None, :], (low | (high << 4)).to(tl.uint8), inside)
