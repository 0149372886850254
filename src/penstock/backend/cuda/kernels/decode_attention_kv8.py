"""Attention of the newest tokens over keys and values of 8 bits, in registers, where the tensor cores read them.

A warp takes 16 * G positions at a time. Lane 4 * g + t of it holds 16 bytes of each 64 of keys g and g + 8, and of
values 4 * t to 4 * t + 3 the g-th eighth: its operands of a product with permuted dimensions (`key_order`,
`value_order`). Tensors are shaped [t, g, warp, ...], which the compiler deals out in that order, so that the changes of
shape below move nothing. Queries are the columns of products: 8, however few there are, or 16 of a run of tokens.

Codes become float16, which holds them exactly. A value's scale is part of the exponent of its weight, so that weights
are at most 1 with any scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.interpreter import INTERPRETED
from penstock.backend.cuda.kernels.kv_tile import line_of, sees
from penstock.backend.cuda.kernels.mma_fragments import apart, axis

QUERIES = 8


@triton.jit
def key_order(place):
    """Returns the dimension at each place of queries and keys: places are (h, word, t, byte)."""
    return place // 64 * 64 + place // 4 % 4 * 16 + place // 16 % 4 * 4 + place % 4


@triton.jit
def value_order(place, DIMS: tl.constexpr):
    """Returns the dimension at each place of what values are mixed to: places are (byte of an eighth, g)."""
    return place % 8 * (DIMS // 8) + place // 8


@triton.jit
def pair(left, right, FIRST: tl.constexpr, SECOND: tl.constexpr, FP8: tl.constexpr):
    """Returns byte FIRST of `left` and byte SECOND of `right` as float16: [...] -> [..., 2]."""
    if INTERPRETED:
        if FP8:
            low = ((left >> (8 * FIRST)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
            high = ((right >> (8 * SECOND)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            low = ((left << (24 - 8 * FIRST)) >> 24).to(tl.float16)
            high = ((right << (24 - 8 * SECOND)) >> 24).to(tl.float16)
    else:
        if FP8:
            both = tl.inline_asm_elementwise(
                """{
                .reg .b32 both;
                .reg .b16 low, high;
                prmt.b32 both, $1, $2, $3;
                mov.b32 {low, high}, both;
                cvt.rn.f16x2.e4m3x2 $0, low;
                }""",
                "=r,r,r,r",
                [left, right, FIRST + (4 + SECOND) * 16],
                dtype=tl.uint32,
                is_pure=True,
                pack=1,
            )
        else:  # a byte with its highest bit turned is code + 128: in the low bits of 1024.0, exact
            both = tl.inline_asm_elementwise(
                """{
                .reg .b32 both;
                prmt.b32 both, $1, $2, $3;
                lop3.b32 both, both, 0x00FF00FF, 0x64806480, 0x6A;
                sub.rn.f16x2 $0, both, $4;
                }""",
                "=r,r,r,r,r",
                [left, right, FIRST + (4 + SECOND) * 256, 0x64806480],
                dtype=tl.uint32,
                is_pure=True,
                pack=1,
            )
        low = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        high = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def groups_of(table, start, end, kv_head, SHAPE: tl.constexpr, WARPS: tl.constexpr, G: tl.constexpr):
    """Returns the first line of each group of 16 positions: [t, g, warp, G]."""
    group = start + axis(WARPS, 2, 4) * (16 * G) + axis(G, 3, 4) * 16 + axis(4, 0, 4) * 0 + axis(8, 1, 4) * 0
    block = tl.load(table + group // SHAPE.block_size, group < end, 0).to(tl.int64)
    return line_of(block, group, kv_head, SHAPE)


@triton.jit
def load_group(words, scales, line, SHAPE: tl.constexpr, WARPS: tl.constexpr, G: tl.constexpr):
    """Returns keys [t, g, warp, G, half, h, 4], values [t, g, warp, G, side, e, words], and the scales of both as
    scores lie, [t, g, warp, G, half]."""
    DIMS: tl.constexpr = SHAPE.dims
    WORDS: tl.constexpr = DIMS // 4
    base = tl.reshape(line, [4, 8, WARPS, G, 1, 1, 1])
    at = (base + axis(2, 4, 7) * 8 + axis(8, 1, 7)) * WORDS + axis(4, 0, 7) * 4
    keys = tl.load(words + at + axis(DIMS // 64, 5, 7) * 16 + axis(4, 6, 7))
    at = (base + SHAPE.apart + axis(4, 0, 7) * 4 + axis(2, 4, 7) * 2 + axis(2, 5, 7)) * WORDS
    values = tl.load(words + at + axis(8, 1, 7) * (DIMS // 32) + axis(DIMS // 32, 6, 7))
    at = tl.reshape(line, [4, 8, WARPS, G, 1]) + axis(2, 4, 5) * 8 + axis(8, 1, 5)
    key_scales = tl.load(apart(scales, at)).to(tl.float32, bitcast=True)
    return keys, values, key_scales, tl.load(apart(scales, at + SHAPE.apart)).to(tl.float32, bitcast=True)


@triton.jit
def as_keys(words, DIMS: tl.constexpr, WARPS: tl.constexpr, G: tl.constexpr, FP8: tl.constexpr):
    """Returns the keys in words as float16: [warp, 16 * G, DIMS]."""
    near = pair(words, words, 0, 1, FP8)
    far = pair(words, words, 2, 3, FP8)
    codes = tl.join(near, far)  # t, g, warp, G, half, h, word, byte % 2, byte // 2
    return tl.reshape(tl.permute(codes, [2, 3, 4, 1, 5, 6, 0, 8, 7]), [WARPS, 16 * G, DIMS])


@triton.jit
def as_values(words, DIMS: tl.constexpr, WARPS: tl.constexpr, G: tl.constexpr, FP8: tl.constexpr):
    """Returns the values in words as float16: [warp, DIMS, 16 * G]."""
    left, right = tl.split(tl.permute(words, [0, 1, 2, 3, 4, 6, 5]))  # t, g, warp, G, side, word
    even = tl.join(pair(left, right, 0, 0, FP8), pair(left, right, 2, 2, FP8))
    odd = tl.join(pair(left, right, 1, 1, FP8), pair(left, right, 3, 3, FP8))
    codes = tl.join(even, odd)  # t, g, warp, G, side, word, e, byte // 2, byte % 2
    return tl.reshape(tl.permute(codes, [2, 5, 7, 8, 1, 3, 0, 4, 6]), [WARPS, DIMS, 16 * G])


@triton.jit
def as_scores(values, WARPS: tl.constexpr, G: tl.constexpr, N: tl.constexpr):
    """Repeats what each position has for each of N queries: [t, g, warp, G, half] -> [warp, 16 * G, N]."""
    both = tl.broadcast_to(tl.expand_dims(values, 5), [4, 8, WARPS, G, 2, 2])
    if N > 8:
        both = tl.broadcast_to(tl.expand_dims(both, 6), [4, 8, WARPS, G, 2, 2, N // 8])
        both = tl.permute(both, [2, 3, 4, 1, 6, 0, 5])
    else:
        both = tl.permute(both, [2, 3, 4, 1, 0, 5])
    return tl.reshape(both, [WARPS, 16 * G, N])


@triton.jit
def attend_kv8(q, kv, table, kv_head, begin, end, lengths, scale, CONFIG: tl.constexpr):
    """Attends with queries [N, DIMS], in the order of keys, from `begin` to `end`; returns their highest score, the sum
    of weights and the mix of values [N, DIMS], in the order of values. In a run, each query attends as the newest of
    its own `lengths` positions."""
    SHAPE: tl.constexpr = CONFIG.shape
    OPTIONS: tl.constexpr = CONFIG.options
    WARPS: tl.constexpr = CONFIG.warps
    G: tl.constexpr = CONFIG.groups
    N: tl.constexpr = CONFIG.queries
    DIMS: tl.constexpr = SHAPE.dims
    FP8: tl.constexpr = kv.lines.dtype.element_ty == tl.float8e4nv
    STEP: tl.constexpr = WARPS * 16 * G
    words = kv.lines.to(tl.pointer_type(tl.int32), bitcast=True)
    q = q.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(q), 1), 1e-12)  # [N]
    q = tl.broadcast_to(tl.trans((q / largest[:, None]).to(tl.float16))[None, :, :], [WARPS, DIMS, N])
    scale = (largest * scale)[None, None, :]

    highest = tl.full([WARPS, N], -1e30, tl.float32)
    total = tl.zeros([WARPS, N], tl.float32)
    mix = tl.zeros([WARPS, DIMS, N], tl.float32)
    start = begin // 16 * 16
    line = groups_of(table, start, end, kv_head, SHAPE, WARPS, G)
    keys, values, key_scales, value_scales = load_group(words, kv.scales, line, SHAPE, WARPS, G)
    line = groups_of(table, start + STEP, end, kv_head, SHAPE, WARPS, G)
    place = (tl.arange(0, WARPS) * (16 * G))[:, None, None] + tl.arange(0, 16 * G)[None, :, None]
    for at in tl.range(start, end, STEP):
        more_keys, more_values, more_key_scales, more_value_scales = load_group(words, kv.scales, line, SHAPE, WARPS, G)
        line = groups_of(table, at + 2 * STEP, end, kv_head, SHAPE, WARPS, G)
        value_scales = tl.maximum(value_scales, 1e-30)
        score = tl.dot(as_keys(keys, DIMS, WARPS, G, FP8), q) * scale  # [warp, 16 * G, N]
        score = score * as_scores(key_scales, WARPS, G, N) + as_scores(tl.log2(value_scales), WARPS, G, N)
        visible = (at + place >= begin) & (at + place < end)
        if CONFIG.run > 1:
            visible = visible & sees(at + place, lengths[None, None, :], OPTIONS)
        score = tl.where(visible, score, -float("inf"))
        peak = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score - peak[:, None, :])
        shrink = tl.exp2(highest - peak)
        total = total * shrink + tl.sum(weight * as_scores(1.0 / value_scales, WARPS, G, N), 1)
        mixed = as_values(values, DIMS, WARPS, G, FP8)
        mix = tl.dot(mixed, weight.to(tl.float16), mix * shrink[:, None, :])
        highest = peak
        keys, values, key_scales, value_scales = more_keys, more_values, more_key_scales, more_value_scales

    peak = tl.max(highest, 0)
    shrink = tl.exp2(highest - peak[None, :])
    return peak, tl.sum(total * shrink, 0), tl.trans(tl.sum(mix * shrink[:, None, :], 0))
