"""Defines how attention kernels address the paged KV cache, and the running softmax that they share.

A cache is [blocks, 2, kv_heads, block_size, D]. A line is what one position has in one head: D values, and one scale
where the cache has 8 bits. Splits and tiles are planned on the host (inputs.py) and read from device memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


class PagedKv(NamedTuple):
    """Holds a layer's cache and the block tables that say where each row's positions are."""

    lines: Any
    scales: Any  # read only where the cache has 8 bits
    tables: Any
    header: Any  # its first number is the width of `tables`


class KvShape(NamedTuple):
    """Holds the constants of a layer's heads and cache."""

    kv_heads: int
    group: int  # query heads that share a KV head
    dims: int
    block_size: int
    block_d: int  # dims rounded up to a power of two
    block_lines: int  # from block to block
    row_heads: int  # in a row of qkv: of queries, and of keys and values unless another layer wrote them

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def apart(self) -> int:
        return self.kv_heads * self.block_size


class SplitKV(NamedTuple):
    """Holds the partial results of one context, which its last program joins; `arrived` is zero between launches."""

    outputs: Any  # [P * heads * D]
    stats: Any  # [P * heads * 2] the highest score, and the sum of weights
    arrived: Any  # [P * kv_heads] by the first split of each context


def shape_of(cache: Any, qkv: Any, out: Any) -> KvShape:
    """Returns the constants of a cache [blocks, 2, kv_heads, block_size, D], rows of qkv and outputs [T, heads * D]."""
    kv_heads, block_size, dims = cache.shape[2:]
    group = out.shape[1] // dims // kv_heads
    block_d, block_lines = max(triton.next_power_of_2(dims), 16), cache.stride(0) // dims
    return KvShape(kv_heads, group, dims, block_size, block_d, block_lines, qkv.shape[1] // dims)


@triton.jit
def table_of(kv, row):
    return kv.tables + row.to(tl.int64) * tl.load(kv.header)


@triton.jit
def load_split(splits, split):
    """Returns (row, begin, end, length of the whole context, how many splits it has, the first of them)."""
    at = splits + split * 8
    row, begin, end = tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return row, begin, end, tl.load(at + 4), tl.load(at + 5), tl.load(at + 6)


@triton.jit
def load_blocks(table, position, end, BLOCK_SIZE: tl.constexpr):
    """Returns the blocks of positions. They are loaded a tile ahead: a load whose address comes from a load of its own
    turn cannot be started early."""
    return tl.load(table + position // BLOCK_SIZE, position < end, 0).to(tl.int64)


@triton.jit
def line_of(block, offset, kv_head, SHAPE: tl.constexpr):
    """Returns the line of a key; its value is SHAPE.apart lines further on."""
    return block * SHAPE.block_lines + kv_head * SHAPE.block_size + offset % SHAPE.block_size


@triton.jit
def first_seen(begin, length, OPTIONS: tl.constexpr):
    if OPTIONS.window:
        begin = tl.maximum(begin, length - OPTIONS.window)
    if OPTIONS.chunk:
        begin = tl.maximum(begin, (length - 1) // OPTIONS.chunk * OPTIONS.chunk)
    return begin


@triton.jit
def sees(position, length, OPTIONS: tl.constexpr):
    """Returns whether the newest of `length` positions sees a position: both may have any shapes that go together."""
    return (position < length) & (position >= first_seen(length * 0, length, OPTIONS))


@triton.jit
def no_scores(QUERIES: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns a running softmax over nothing: the highest score, the sum of weights, and the mix of values."""
    highest = tl.full([QUERIES], -1e30, tl.float32)
    return highest, tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, BLOCK_D], tl.float32)


@triton.jit
def soften(score, highest, total):
    """Takes scores into a running softmax; returns its highest score, their weights, what the mix so far shrinks by,
    and the sum of weights."""
    peak = tl.maximum(highest, tl.max(score, 1))
    weight = tl.exp2(score - peak[:, None])
    shrink = tl.exp2(highest - peak)
    return peak, weight, shrink, total * shrink + tl.sum(weight, 1)


@triton.jit
def soft_capped(score, cap):
    """Returns cap * tanh(score / cap), both times log2(e)."""
    return cap * (1.0 - 2.0 / (tl.exp2(score / cap * 2.8853900817779268) + 1.0))


@triton.jit
def store_mix(out, row, column, mix, total, wanted, DIMS: tl.constexpr):
    target = out + row[:, None] * DIMS + column[None, :]
    tl.store(target, (mix / total[:, None]).to(out.dtype.element_ty), wanted)


@triton.jit
def leave_split(split_kv, row, column, mix, highest, total, there, wanted, DIMS: tl.constexpr):
    """Stores a split's result for the program that joins all splits of its context."""
    tl.store(split_kv.outputs + row[:, None] * DIMS + column[None, :], mix, wanted)
    tl.store(split_kv.stats + row * 2, highest, there)
    tl.store(split_kv.stats + row * 2 + 1, total, there)
    tl.debug_barrier()
