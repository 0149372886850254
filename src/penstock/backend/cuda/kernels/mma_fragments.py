"""Quantized weights in registers, where the tensor cores read them: no value passes through shared memory.

A matrix lies in tiles of 16 rows and 64 columns (quantize.py packs them). Of the 16 columns of step c, lane 4 * g + t
of a warp holds rows g and g + 8 (`half` 0, 1) at columns 2 * t + e and 2 * t + 8 + e (`side` 0, 1; e 0, 1): what it
gives to one 16 x 16 product. Tensors are shaped [t, g, A, B, C, ...]: lanes first, then three axes of tiles, the first
spread over warps. The compiler deals axes out in that order, so that the changes of shape below move nothing.

Axis B runs along a row of tiles. Axis A does too, STEP tiles at a time, or down the rows where STEP is 0. `row` is an
index of tiles shaped like these tensors, `column` the first tile's.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.lookup import looked_up, table_of
from penstock.backend.cuda.pack_quantized import QuantizedWeight

BASE = 0x43004300  # two 128.0 in bfloat16


def facts(weight: QuantizedWeight) -> dict[str, Any]:
    """What a kernel must know of a weight's coding when it is compiled."""
    coding = weight.coding
    return {
        "HIGH": coding.bits - 4,
        "GROUPS": coding.groups,
        "MINIMA": coding.minima,
        "SUPER": coding.bytes,
        "BFLOAT": coding.bfloat,
        "ZERO": coding.zero + 128 if coding.shifted else 0,
        "SHIFTED": coding.shifted,
        "TABLE": table_of(coding),
    }


def arrays(weight: QuantizedWeight) -> tuple[Any, Any, Any, Any]:
    """Low bits, high bits, scales and supers, with another in place of what is not there."""
    high = weight.low if weight.high is None else weight.high
    return weight.low, high, weight.scales, weight.scales if weight.supers is None else weight.supers


@triton.jit
def axis(n: tl.constexpr, at: tl.constexpr, AXES: tl.constexpr = 6):
    """0 .. n - 1 along axis `at` of [t, g, A, B, C, numbers]."""
    i = tl.arange(0, n)
    for place in tl.static_range(AXES):
        if place != at:
            i = tl.expand_dims(i, place)
    return i


@triton.jit
def apart(words, offset):
    """Addresses whose neighbours the compiler does not see, so that it gives each to a lane of its own."""
    return (words.to(tl.pointer_type(tl.int16)) + offset * 2).to(tl.pointer_type(tl.int32))


@triton.jit
def load_words(
    words, row, column, tiles, A: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr
):
    """N words of each lane: [t, g, A, B, C, N]. 4 of them lie together at most, in one load of 16 bytes."""
    TOGETHER: tl.constexpr = N if N < 4 else 4
    lane = axis(A, 2) * (STEP * 32 * N) + (axis(8, 1) * 4 + axis(4, 0)) * TOGETHER
    at = words + column * (32 * N)
    at = apart(at, lane) if N == 1 else at + lane
    at = at + row * (tiles * 32 * N) + axis(B, 3) * (32 * N) + axis(TOGETHER, 5)
    inside = column + axis(A, 2) * STEP + axis(B, 3) < tiles
    loaded = tl.load(at) if EVEN else tl.load(at, inside, 0)
    if N == 8:
        rest = tl.load(at + 128) if EVEN else tl.load(at + 128, inside, 0)
        loaded = tl.permute(tl.join(loaded, rest), [0, 1, 2, 3, 4, 6, 5])
        loaded = tl.reshape(loaded, [4, 8, A, B, loaded.shape[4], 8])
    return loaded.to(tl.uint32, bitcast=True)


@triton.jit
def load_factors(
    words, row, column, tiles, A: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr
):
    """N words of each g: [t, g, A, B, C, N]."""
    lane = axis(A, 2) * (STEP * 8 * N) + axis(8, 1) * N + axis(4, 0) * 0
    at = words + column * (8 * N)
    at = apart(at, lane) if N == 1 else at + lane
    at = at + row * (tiles * 8 * N) + axis(B, 3) * (8 * N) + axis(N, 5)
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, column + axis(A, 2) * STEP + axis(B, 3) < tiles, 0)


@triton.jit
def load_supers(
    words, row, column, tiles, A: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr
):
    """N words of each g, which serve 4 tiles of a row: [t, g, A, B / 4, C, N]."""
    RUNS: tl.constexpr = (B + 3) // 4
    lane = (column + axis(A, 2) * STEP) // 4 * (8 * N) + axis(8, 1) * N + axis(4, 0) * 0
    at = apart(words, lane) if N == 1 else words + lane
    at = at + row * (tl.cdiv(tiles, 4) * 8 * N) + axis(RUNS, 3) * (8 * N) + axis(N, 5)
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, column + axis(A, 2) * STEP + axis(RUNS, 3) * 4 < tiles, 0)


@triton.jit
def halves(words):
    """The two bfloat16 of each word: [...] -> [..., e]."""
    low = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def pair(low, high, base, i: tl.constexpr, HIGH: tl.constexpr):
    """Pair i of the four of each word, as two bfloat16 of 128 + code: [t, g, A, B, C, c]."""
    codes = ((low >> (4 * i)) & 0x000F000F) ^ base
    if HIGH > 0:
        by = axis(4, 5) * 4 % (16 // HIGH) * HIGH + (i * HIGH - 4)
        moved = tl.where(by < 0, high << (-by & 31), high >> (by & 31))
        codes |= moved & (0x00100010 if HIGH == 1 else 0x00300030)
    return codes


@triton.jit
def pairs_of(low, high, base, HIGH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    if HIGH > 0:
        high = tl.reshape(high, [4, 8, A, B, C, HIGH, 1])
        high = tl.reshape(tl.broadcast_to(high, [4, 8, A, B, C, HIGH, 4 // HIGH]), [4, 8, A, B, C, 4])
    near = tl.join(pair(low, high, base, 0, HIGH), pair(low, high, base, 1, HIGH))
    far = tl.join(pair(low, high, base, 2, HIGH), pair(low, high, base, 3, HIGH))
    return halves(tl.join(near, far))


@triton.jit
def byte(words, i: tl.constexpr):
    """A byte less 128, through the low bits of 2 ** 23."""
    return (((words >> (8 * i)) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def bytes_of(words, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Codes of 8 bits less 128, in float32: [t, g, A, B, C, (c, side)] -> [t, g, A, B, C, c, half, side, e]."""
    near = tl.join(byte(words, 0), byte(words, 2))
    far = tl.join(byte(words, 1), byte(words, 3))
    values = tl.reshape(tl.join(near, far), [4, 8, A, B, C, 4, 2, 2, 2])  # ..., c, side, half, e
    return tl.permute(values, [0, 1, 2, 3, 4, 5, 7, 6, 8])


@triton.jit
def codes_of(
    low, high, base, HIGH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, TABLE: tl.constexpr = 0
):
    """128 + code of 4, 5 or 6 bits, a byte less 128, or what a table has for a code: [t, g, A, B, C, c, half, side, e],
    exact in bfloat16. `base` is BASE: an argument, since one instruction masks and adds it only while it is no
    constant."""
    if TABLE:
        return looked_up(low, TABLE)
    elif HIGH == 4:
        return bytes_of(low, A, B, C)
    else:
        return pairs_of(low, high, base, HIGH, A, B, C)


@triton.jit
def float16_of(words):
    """The two float16 of each word, as float32: [...] -> [..., 2]."""
    low = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low.to(tl.float32), high.to(tl.float32))


@triton.jit
def bfloat16_of(words):
    """The same of bfloat16."""
    words = words.to(tl.uint32, bitcast=True)
    return tl.join((words << 16).to(tl.float32, bitcast=True), (words & 0xFFFF0000).to(tl.float32, bitcast=True))


@triton.jit
def signed_byte(words, i: tl.constexpr):
    return ((words << (24 - 8 * i)) >> 24).to(tl.float32)


@triton.jit
def int8_of(words):
    """The four signed bytes of each word: [...] -> [..., 2, 2]."""
    even = tl.join(signed_byte(words, 0), signed_byte(words, 2))
    return tl.join(even, tl.join(signed_byte(words, 1), signed_byte(words, 3)))


@triton.jit
def affine_of(
    factors,
    supers,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    GROUPS: tl.constexpr,
    MINIMA: tl.constexpr,
    SUPER: tl.constexpr,
    ZERO: tl.constexpr,
    BFLOAT: tl.constexpr = False,
):
    """What codes are multiplied with and what is added then, of each group of columns: [t, g, A, B, C, group, half]."""
    EACH: tl.constexpr = 4 if MINIMA else 2
    numbers = int8_of(factors) if SUPER else bfloat16_of(factors) if BFLOAT else float16_of(factors)
    numbers = tl.reshape(numbers, [4, 8, A, B, C, GROUPS, EACH])
    if SUPER:
        RUNS: tl.constexpr = (B + 3) // 4
        outer = tl.reshape(float16_of(supers), [4, 8, A, RUNS, 1, C, EACH])
        outer = tl.broadcast_to(outer, [4, 8, A, RUNS, B // RUNS, C, EACH])
        numbers *= tl.reshape(outer, [4, 8, A, B, C, 1, EACH])
    if MINIMA:
        scale, minimum = tl.split(tl.reshape(numbers, [4, 8, A, B, C, GROUPS, 2, 2]))
        return scale, minimum - ZERO * scale
    else:
        return numbers, numbers * -ZERO


@triton.jit
def load_tiles(
    low,
    high,
    scales,
    supers,
    row,
    column,
    tiles,
    A: tl.constexpr,
    B: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    HIGH: tl.constexpr,
    GROUPS: tl.constexpr,
    MINIMA: tl.constexpr,
    SUPER: tl.constexpr,
):
    """Low bits, high bits, factors and theirs."""
    words = load_words(low, row, column, tiles, A, B, STEP, EVEN, 8 if HIGH == 4 else 4)
    more = words
    if HIGH == 1 or HIGH == 2:
        more = load_words(high, row, column, tiles, A, B, STEP, EVEN, HIGH)
    EACH: tl.constexpr = 2 if MINIMA else 1  # words of float16; half as many of bytes
    factors = load_factors(scales, row, column, tiles, A, B, STEP, EVEN, GROUPS * EACH // 2 if SUPER else GROUPS * EACH)
    outer = factors
    if SUPER:
        outer = load_supers(supers, row, column, tiles, A, B, STEP, EVEN, EACH)
    return words, more, factors, outer


@triton.jit
def values_of(codes, scale, minimum, A: tl.constexpr, B: tl.constexpr, GROUPS: tl.constexpr, SHIFTED: tl.constexpr):
    """Values of tiles in A rows and B columns: [16 * A, 64 * B] of float32."""
    scale = tl.reshape(scale, [4, 8, A, B, GROUPS, 1, 2, 1, 1])
    values = tl.reshape(codes, [4, 8, A, B, GROUPS, 4 // GROUPS, 2, 2, 2]).to(tl.float32) * scale
    if SHIFTED:
        values += tl.reshape(minimum, [4, 8, A, B, GROUPS, 1, 2, 1, 1])
    values = tl.permute(values, [2, 6, 1, 3, 4, 5, 7, 0, 8])  # A, half, g, B, group, c, side, t, e
    return tl.reshape(values, [16 * A, 64 * B])
