"""Quantized weights in registers, where the tensor cores read them: no value passes through shared memory.

A matrix lies in tiles of 16 rows and 64 columns (pack_quantized.py). Of the 16 columns of step c, lane 4 * g + t of a
warp holds rows g and g + 8 (`half` 0, 1) at columns 2 * t + e and 2 * t + 8 + e (`side` 0, 1; e 0, 1): its operands
of one 16 x 16 product. Tensors are shaped [t, g, A, B, C, ...]: lanes first, then three axes of tiles, the
first spread over warps. The compiler deals axes out in that order, so that the changes of shape below move nothing.

Axis B runs along a row of tiles. Axis A does too, STEP tiles at a time, or down the rows where STEP is 0. `row` is an
index of tiles shaped like these tensors, `column` the first tile's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.lookup import looked_up, table_of
from penstock.backend.cuda.pack_quantized import QuantizedWeight

BASE = 0x43004300  # two 128.0 in bfloat16


class QuantFormat(NamedTuple):
    """Describes a matrix's coding to the compiler."""

    high: int  # bits of a code beyond four
    groups: int  # scales per row of a tile
    minima: bool
    supers: bool  # scales are bytes that float16 multiply
    e4m3: bool  # scales are floats of 8 bits
    e8m0: bool  # scales are powers of two of 8 bits
    zero: float  # zero of codes as `codes_of` returns them
    added: bool  # something is added to scale * code
    scaled_minima: bool  # scales multiply minima
    table: int  # see lookup.py; 0: none
    words: int  # scales and minima of a row of a tile and of the row 8 below


class QuantMatrix(NamedTuple):
    """Holds a quantized matrix as kernels take it. `base` is BASE, and no constant: one instruction masks codes and
    adds it only while the compiler does not know it."""

    low: Any
    high: Any
    scales: Any
    supers: Any
    rows: int
    tiles: int  # in a row of tiles
    width: int
    base: int
    factor: float  # multiplies all products


def format_of(weight: QuantizedWeight) -> QuantFormat:
    coding = weight.coding
    zero = coding.zero + coding.shift
    numbers = coding.groups * (2 if coding.minima else 1)
    return QuantFormat(
        high=coding.bits - 4,
        groups=coding.groups,
        minima=coding.minima,
        supers=coding.bytes,
        e4m3=coding.e4m3,
        e8m0=coding.e8m0,
        zero=zero,
        added=coding.minima or zero != 0,
        scaled_minima=coding.scaled_minima,
        table=table_of(coding),
        words=numbers // 2 if coding.bytes or coding.e4m3 or coding.e8m0 else numbers,
    )


def matrix_of(weight: QuantizedWeight, rows: int = 0) -> QuantMatrix:
    """Returns a weight's arrays and sizes, with any other array for one that its coding lacks; `rows`: one matrix of
    several that lie below each other."""
    high = weight.low if weight.high is None else weight.high
    supers = weight.scales if weight.supers is None else weight.supers
    return QuantMatrix(
        weight.low,
        high,
        weight.scales,
        supers,
        rows or weight.rows,
        weight.tiles,
        weight.width,
        BASE,
        weight.factor * weight.coding.factor,
    )


@triton.jit
def axis(n: tl.constexpr, at: tl.constexpr, AXES: tl.constexpr = 6):
    """Returns 0 .. n - 1 along axis `at` of [t, g, A, B, C, numbers]."""
    i = tl.arange(0, n)
    for place in tl.static_range(AXES):
        if place != at:
            i = tl.expand_dims(i, place)
    return i


@triton.jit
def apart(words, offset):
    """Returns addresses whose neighbours the compiler does not see, so that it gives each to a lane of its own."""
    return (words.to(tl.pointer_type(tl.int16)) + offset * 2).to(tl.pointer_type(tl.int32))


@triton.jit
def load_words(
    words, row, column, tiles, A: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr
):
    """Returns N words of each lane: [t, g, A, B, C, N]. 4 of them lie together at most, in one load of 16 bytes."""
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
    """Returns N words of each g: [t, g, A, B, C, N]."""
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
    """Returns N words of each g, which serve 4 tiles of a row: [t, g, A, B / 4, C, N]."""
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
    """Splits each word into its two bfloat16: [...] -> [..., e]."""
    low = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def pair(low, high, base, i: tl.constexpr, HIGH: tl.constexpr):
    """Returns pair i of the four of each word, as two bfloat16 of 128 + code: [t, g, A, B, C, c]."""
    codes = ((low >> (4 * i)) & 0x000F000F) ^ base
    if HIGH > 0:
        by = axis(4, 5) * 4 % (16 // HIGH) * HIGH + (i * HIGH - 4)
        moved = tl.where(by < 0, high << (-by & 31), high >> (by & 31))
        codes |= moved & (0x00100010 if HIGH == 1 else 0x00300030)
    return codes


@triton.jit
def pairs_of(low, high, base, HIGH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Returns 128 + code for codes of 4, 5 or 6 bits: [t, g, A, B, C, c, half, side, e] of bfloat16."""
    if HIGH > 0:
        high = tl.reshape(high, [4, 8, A, B, C, HIGH, 1])
        high = tl.reshape(tl.broadcast_to(high, [4, 8, A, B, C, HIGH, 4 // HIGH]), [4, 8, A, B, C, 4])
    near = tl.join(pair(low, high, base, 0, HIGH), pair(low, high, base, 1, HIGH))
    far = tl.join(pair(low, high, base, 2, HIGH), pair(low, high, base, 3, HIGH))
    return halves(tl.join(near, far))


@triton.jit
def byte(words, i: tl.constexpr):
    """Returns byte i of each word less 128 in float32, through the low bits of 2 ** 23."""
    return (((words >> (8 * i)) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def bytes_of(words, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Returns codes of 8 bits less 128, in float32: [t, g, A, B, C, (c, side)] -> [t, g, A, B, C, c, half, side, e]."""
    near = tl.join(byte(words, 0), byte(words, 2))
    far = tl.join(byte(words, 1), byte(words, 3))
    values = tl.reshape(tl.join(near, far), [4, 8, A, B, C, 4, 2, 2, 2])  # ..., c, side, half, e
    return tl.permute(values, [0, 1, 2, 3, 4, 5, 7, 6, 8])


@triton.jit
def codes_of(words, more, base, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr):
    """Returns 128 + code of 4, 5 or 6 bits, a byte less 128, or a table's entry for a code, each exact in bfloat16:
    [t, g, A, B, C, c, half, side, e]."""
    if FORMAT.table:
        return looked_up(words, FORMAT.table)
    elif FORMAT.high == 4:
        return bytes_of(words, A, B, C)
    else:
        return pairs_of(words, more, base, FORMAT.high, A, B, C)


@triton.jit
def float16_of(words):
    """Splits each word into its two float16, as float32: [...] -> [..., 2]."""
    low = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low.to(tl.float32), high.to(tl.float32))


@triton.jit
def signed_byte(words, i: tl.constexpr):
    return ((words << (24 - 8 * i)) >> 24).to(tl.float32)


@triton.jit
def int8_of(words):
    """Splits each word into its four signed bytes, as float32: [...] -> [..., 2, 2]."""
    even = tl.join(signed_byte(words, 0), signed_byte(words, 2))
    return tl.join(even, tl.join(signed_byte(words, 1), signed_byte(words, 3)))


@triton.jit
def e4m3_of(words):
    """Splits each word into its four floats of 8 bits, as float32: [...] -> [..., 2, 2]. They come out as 256ths: a
    float16 with the same bits has 15 as the bias of its exponent, not 7."""
    return tl.join(float16_of((words << 7) & 0x3F803F80), float16_of((words >> 1) & 0x3F803F80))


@triton.jit
def power_of_two(words, i: tl.constexpr):
    """Returns the float32 whose exponent is byte i of each word. The lowest is subnormal."""
    bits = ((words >> (8 * i)) & 0xFF) << 23
    return tl.where(bits == 0, 0x400000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_of(words):
    even = tl.join(power_of_two(words, 0), power_of_two(words, 2))
    return tl.join(even, tl.join(power_of_two(words, 1), power_of_two(words, 3)))


@triton.jit
def numbers_of(factors, FORMAT: tl.constexpr):
    """Returns the scales and minima that words hold, as float32, without what `supers` multiply them with."""
    if FORMAT.e4m3:
        return e4m3_of(factors)
    elif FORMAT.e8m0:
        return e8m0_of(factors)
    else:
        return int8_of(factors) if FORMAT.supers else float16_of(factors)


@triton.jit
def minimum_of(minimum, scale, FORMAT: tl.constexpr):
    """Returns the addend of scale * code, for codes as they come."""
    if FORMAT.scaled_minima:
        return (minimum - FORMAT.zero) * scale
    else:
        return minimum - FORMAT.zero * scale


@triton.jit
def affine_of(factors, supers, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the factor and the addend of each group of columns:
    [t, g, A, B, C, group, half] each."""
    GROUPS: tl.constexpr = FORMAT.groups
    EACH: tl.constexpr = 4 if FORMAT.minima else 2
    numbers = tl.reshape(numbers_of(factors, FORMAT), [4, 8, A, B, C, GROUPS, EACH])
    if FORMAT.supers:
        RUNS: tl.constexpr = (B + 3) // 4
        outer = tl.reshape(float16_of(supers), [4, 8, A, RUNS, 1, C, EACH])
        outer = tl.broadcast_to(outer, [4, 8, A, RUNS, B // RUNS, C, EACH])
        numbers *= tl.reshape(outer, [4, 8, A, B, C, 1, EACH])
    if FORMAT.minima:
        scale, minimum = tl.split(tl.reshape(numbers, [4, 8, A, B, C, GROUPS, 2, 2]))
        return scale, minimum_of(minimum, scale, FORMAT)
    else:
        return numbers, numbers * -FORMAT.zero


@triton.jit
def load_codes(
    matrix, row, column, A: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, FORMAT: tl.constexpr
):
    words = load_words(matrix.low, row, column, matrix.tiles, A, B, STEP, EVEN, 8 if FORMAT.high == 4 else 4)
    more = words
    if FORMAT.high == 1 or FORMAT.high == 2:
        more = load_words(matrix.high, row, column, matrix.tiles, A, B, STEP, EVEN, FORMAT.high)
    return words, more


@triton.jit
def load_tiles(
    matrix, row, column, A: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, FORMAT: tl.constexpr
):
    words, more = load_codes(matrix, row, column, A, B, STEP, EVEN, FORMAT)
    factors = load_factors(matrix.scales, row, column, matrix.tiles, A, B, STEP, EVEN, FORMAT.words)
    outer = factors
    if FORMAT.supers:
        EACH: tl.constexpr = 2 if FORMAT.minima else 1
        outer = load_supers(matrix.supers, row, column, matrix.tiles, A, B, STEP, EVEN, EACH)
    return words, more, factors, outer


@triton.jit
def values_of(tiles, base, A: tl.constexpr, B: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the values of tiles in A rows and B columns of tiles: [16 * A, 64 * B] of float32."""
    GROUPS: tl.constexpr = FORMAT.groups
    words, more, factors, outer = tiles
    scale, minimum = affine_of(factors, outer, A, B, 1, FORMAT)
    codes = codes_of(words, more, base, A, B, 1, FORMAT)
    scale = tl.reshape(scale, [4, 8, A, B, GROUPS, 1, 2, 1, 1])
    values = tl.reshape(codes, [4, 8, A, B, GROUPS, 4 // GROUPS, 2, 2, 2]).to(tl.float32) * scale
    if FORMAT.added:
        values += tl.reshape(minimum, [4, 8, A, B, GROUPS, 1, 2, 1, 1])
    values = tl.permute(values, [2, 6, 1, 3, 4, 5, 7, 0, 8])  # A, half, g, B, group, c, side, t, e
    return tl.reshape(values, [16 * A, 64 * B])
