"""Defines how values become a format's bytes; the native quantizer is tested against it.

Each group's scale is searched for. Several divisions of the group's range each give codes; for those codes the best
scale (and minimum) is a weighted least squares problem with a closed-form solution; the division with the least error
wins. If groups share float16 factors, neighbouring scales are tried, codes are chosen for the stored scales, and then
the factors are refitted to those codes. Sums run over the values in order, so that other implementations can match bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from penstock.errors import MalformedFile
from penstock.model.dequantize import LAYOUTS, dequantize
from penstock.model.tensor import Format, Tensor

Array = Any  # an ndarray, as in dequantize.py

RANGE_STEPS = [np.float32(0.1 * step) for step in range(-10, 11)]  # extra codes in a range's division
SCALE_STEPS = [np.float32(0.1 * step) for step in range(-9, 10)]
TINY = np.float32(1e-30)
LARGEST = 65504.0  # finite value of float16


def quantize(tensor: Tensor, format: Format) -> Tensor:
    """Quantizes a matrix, or several; rows must hold whole blocks."""
    values = dequantize(tensor).reshape(-1, format.values) + np.float32(0)  # removes the sign of zeros
    if format.values > 1 and not (np.abs(values) <= LARGEST).all():
        raise not_finite(tensor)
    blocks = BLOCKS[format.name](values)
    return replace(tensor, format=format, source=blocks.view(np.uint8).reshape(-1), scales=None)


def not_finite(tensor: Tensor) -> MalformedFile:
    return MalformedFile(f"tensor {tensor.name!r} holds values above {LARGEST:.0f} or NaN, so it cannot be quantized")


# ---- scales: arrays hold a group's values along the first axis ----


def total(values: Array) -> Array:
    return np.add.accumulate(values, axis=0)[-1]


def inverse(values: Array, of: Any = 1.0) -> Array:
    """Returns `of` / values, and 0 where a value is about 0."""
    return np.divide(np.float32(of), values, out=np.zeros_like(values), where=np.abs(values) > TINY)


def nearest(values: Array, low: int, high: int) -> Array:
    return np.clip(np.rint(values), np.float32(low), np.float32(high))


def half(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float32)


def fit_range(x: Array, weight: Array, top: int, signed: bool) -> tuple[Array, Array]:
    """Fits x to scale * code + minimum, with codes from 0 to `top`. Unless `signed`, minima are at most 0."""
    low, high = x.min(0), x.max(0)
    if not signed:
        low = np.minimum(low, 0)
    span = high - low
    weights, sum_x, sum_xx = total(weight), total(weight * x), total(weight * x * x)
    scale, minimum, least = span / np.float32(top), low, np.full_like(span, np.inf)
    for step in RANGE_STEPS:
        code = nearest((x - low) * inverse(span, top + step), 0, top)
        weighed = weight * code
        sum_c, sum_cc, sum_cx = total(weighed), total(weighed * code), total(weighed * x)
        spread = weights * sum_cc - sum_c * sum_c
        b = (sum_cc * sum_x - sum_c * sum_cx) * inverse(spread)
        if not signed:
            b = np.minimum(b, 0)
        a = (sum_cx - b * sum_c) * inverse(sum_cc)
        error = sum_xx + b * b * weights - a * sum_cx - b * sum_x - b * (sum_x - a * sum_c)
        better = (spread > TINY) & (error < least)
        scale, minimum = np.where(better, a, scale), np.where(better, b, minimum)
        least = np.where(better, error, least)
    return scale, minimum


def fit_scale(x: Array, weight: Array, most: int) -> Array:
    """Fits x to scale * code with codes from -most to most - 1; returns the scale."""
    high, low = x.max(0), x.min(0)
    extreme = np.where(high > -low, high, low)
    scale, best = np.zeros_like(extreme), np.zeros_like(extreme)
    for step in SCALE_STEPS:
        code = nearest(x * inverse(extreme, -(most + step)), -most, most - 1)
        weighed = weight * code
        sum_cc, sum_cx = total(weighed * code), total(weighed * x)
        a = sum_cx * inverse(sum_cc)
        better = a * sum_cx > best
        scale, best = np.where(better, a, scale), np.where(better, a * sum_cx, best)
    return scale


# ---- bits ----


def packed(codes: Array, width: int) -> Array:
    """Inverts dequantize.bits: [..., 8 / width, n] -> [..., n]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(codes << shifts, axis=-2)


def packed_pairs(scale: Array, minimum: Array) -> Array:
    """Inverts dequantize.six_bit_pairs: 2 * [b, 8] -> [b, 12]."""
    first = scale[:, :4] | scale[:, 4:] >> 4 << 6
    second = minimum[:, :4] | minimum[:, 4:] >> 4 << 6
    return np.concatenate([first, second, scale[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4], axis=1)


def blocks_of(name: str, **fields: Array) -> Array:
    blocks = np.zeros(len(next(iter(fields.values()))), LAYOUTS[name])
    for field, values in fields.items():
        blocks[field] = values
    return blocks


# ---- blocks of 32: values [blocks, 32] ----


def nibbles(name: str, code: Array, **factors: Array) -> Array:
    """Returns blocks of codes [32, blocks]; a fifth bit is stored separately."""
    codes = code.T.astype(np.uint8)
    fields = factors | {"qs": packed((codes & 15).reshape(-1, 2, 16), 4)}
    if "qh" in (LAYOUTS[name].names or ()):
        fields["qh"] = np.packbits(codes >> 4, axis=1, bitorder="little")
    return blocks_of(name, **fields)


def scaled(name: str, most: int) -> Callable[[Array], Array]:
    def encode(values: Array) -> Array:
        x = values.T.copy()
        scale = half(fit_scale(x, np.ones_like(x), most))
        return nibbles(name, nearest(x * inverse(scale), -most, most - 1) + most, d=scale)

    return encode


def ranged(name: str, top: int) -> Callable[[Array], Array]:
    def encode(values: Array) -> Array:
        x = values.T.copy()
        scale, minimum = map(half, fit_range(x, np.ones_like(x), top, signed=True))
        return nibbles(name, nearest((x - minimum) * inverse(scale), 0, top), d=scale, m=minimum)

    return encode


def q8_0(values: Array) -> Array:
    x = values.T.copy()
    scale = half(np.abs(x).max(0) / np.float32(127))
    return blocks_of("Q8_0", d=scale, qs=nearest(x * inverse(scale), -127, 127).T)


# ---- blocks of 256 in several groups: [values, groups, blocks] ----


def grouped(values: Array, size: int) -> Array:
    """Rearranges values by group: [blocks, 256] -> [size, groups, blocks]."""
    return values.reshape(len(values), -1, size).transpose(2, 1, 0).copy()


def importance(x: Array) -> Array:
    """Returns the error weight of each value; larger values weigh more."""
    mean = total(total(x * x)) / np.float32(256)
    return np.float32(1.5) * np.sqrt(mean) + np.abs(x)


def k_blocks(values: Array, top: int) -> tuple[Array, dict[str, Array]]:
    """Returns codes [blocks, 8, 32] and their scale fields."""
    x = grouped(values, 32)
    weight = importance(x)
    scale, minimum = fit_range(x, weight, top, signed=False)
    d, m = half(scale.max(0) / np.float32(63)), half((0 - minimum.min(0)) / np.float32(63))
    scales, minima = nearby(
        x, weight, d, m, nearest(scale * inverse(d), 0, 63), nearest((0 - minimum) * inverse(m), 0, 63), top
    )
    code = k_codes(x, d * scales, m * minima, top)
    d, m = refit(x, weight, scales * code, minima, d, m)
    code = k_codes(x, d * scales, m * minima, top)
    fields = {"d": d, "m": m, "scales": packed_pairs(scales.T.astype(np.uint8), minima.T.astype(np.uint8))}
    return code.transpose(2, 1, 0).astype(np.uint8), fields


def k_codes(x: Array, scale: Array, minimum: Array, top: int) -> Array:
    return nearest((x + minimum) * inverse(scale), 0, top)


def nearby(x: Array, weight: Array, d: Array, m: Array, scales: Array, minima: Array, top: int) -> tuple[Array, Array]:
    """Tries each group's scale and minimum plus and minus one; returns the pair with the least error."""
    found, least = (scales, minima), np.full_like(scales, np.inf)
    for more, deeper in product((0, -1, 1), repeat=2):
        s, n = np.clip(scales + np.float32(more), 0, 63), np.clip(minima + np.float32(deeper), 0, 63)
        error = d * s * k_codes(x, d * s, m * n, top) - m * n - x
        wrong = total(weight * error * error)
        better = wrong < least
        found = np.where(better, s, found[0]), np.where(better, n, found[1])
        least = np.where(better, wrong, least)
    return found


def refit(x: Array, weight: Array, u: Array, n: Array, d: Array, m: Array) -> tuple[Array, Array]:
    """Fits d * u - m * n to x for each block; returns the factors, or `d` and `m` unless others are clearly better."""
    sums = [total(total(weight * left * right)) for left, right in ((u, u), (u, n), (n, n), (u, x), (n, x))]
    uu, un, nn, ux, nx = sums
    spread = uu * nn - un * un
    both = (nn * ux - un * nx) * inverse(spread), (un * ux - uu * nx) * inverse(spread)
    clear = (spread > np.float32(1e-4) * (uu * nn)) & (both[0] > 0) & (both[1] > 0)
    return half(np.where(clear, both[0], d)), half(np.where(clear, both[1], m))


def q4_k(values: Array) -> Array:
    codes, fields = k_blocks(values, 15)
    return blocks_of("Q4_K", qs=packed(codes.reshape(-1, 4, 2, 32), 4).reshape(-1, 128), **fields)


def q5_k(values: Array) -> Array:
    codes, fields = k_blocks(values, 31)
    qs = packed((codes & 15).reshape(-1, 4, 2, 32), 4).reshape(-1, 128)
    return blocks_of("Q5_K", qs=qs, qh=packed(codes >> 4, 1), **fields)


def q6_k(values: Array) -> Array:
    x = grouped(values, 16)
    weight = importance(x)
    scale = fit_scale(x, weight, 32)
    high, low = scale.max(0), scale.min(0)
    d = half(np.where(high > -low, high, low) / np.float32(-128))
    scales = nearest(scale * inverse(d), -128, 127)
    u = scales * nearest(x * inverse(d * scales), -32, 31)
    uu, ux = total(total(weight * u * u)), total(total(weight * u * x))
    d = half(np.where(uu > TINY, ux * inverse(uu), d))
    codes = (nearest(x * inverse(d * scales), -32, 31) + 32).transpose(2, 1, 0).astype(np.uint8)
    qs = packed((codes & 15).reshape(-1, 2, 2, 64), 4).reshape(-1, 128)
    qh = packed((codes >> 4).reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return blocks_of("Q6_K", qs=qs, qh=qh, scales=scales.T, d=d)


# ---- plain formats ----


def bf16(values: Array) -> Array:
    words = values.view(np.uint32)
    return blocks_of("BF16", x=(words + 0x7FFF + (words >> 16 & 1) >> 16).astype(np.uint16)[:, 0])


BLOCKS: dict[str, Callable[[Array], Array]] = {
    "F32": lambda values: blocks_of("F32", x=values[:, 0]),
    "F16": lambda values: blocks_of("F16", x=values[:, 0]),
    "BF16": bf16,
    "Q4_0": scaled("Q4_0", 8),
    "Q4_1": ranged("Q4_1", 15),
    "Q5_0": scaled("Q5_0", 16),
    "Q5_1": ranged("Q5_1", 31),
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
