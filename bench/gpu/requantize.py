"""Values rounded to the formats of GGUF files, plainly: the largest value or the range of a group decides its scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Array = Any  # a torch tensor


def half(values: Array) -> tuple[Array, Array]:
    """As float16: its bytes in the last axis, and what it then is."""
    rounded = values.half()
    return rounded[..., None].view(torch.uint8), rounded.float()


def divided(values: Array, scale: Array) -> Array:
    return torch.where(scale == 0, 0.0, values / torch.where(scale == 0, 1.0, scale))


def nibbles(codes: Array) -> Array:
    """The first half of the last axis in the low bits, the second in the high ones."""
    low, high = codes.chunk(2, -1)
    return low | high << 4


def extreme(values: Array) -> Array:
    """The value furthest from 0, with its sign: [..., n] -> [...]."""
    return values.gather(-1, values.abs().argmax(-1, keepdim=True))[..., 0]


def q8_0(x: Array) -> Array:
    d, scale = half(x.abs().amax(-1) / 127)
    codes = divided(x, scale[..., None]).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([d, codes.view(torch.uint8)], -1)


def q4_0(x: Array) -> Array:
    d, scale = half(extreme(x) / -8)
    codes = (divided(x, scale[..., None]) + 8.5).floor().clamp(0, 15).to(torch.uint8)
    return torch.cat([d, nibbles(codes)], -1)


def q4_1(x: Array) -> Array:
    m, lowest = half(x.amin(-1))
    d, scale = half((x.amax(-1) - lowest) / 15)
    codes = divided(x - lowest[..., None], scale[..., None]).round().clamp(0, 15).to(torch.uint8)
    return torch.cat([d, m, nibbles(codes)], -1)


def six_bits(scales: Array, minima: Array) -> Array:
    """8 scales and 8 minima of 6 bits in 12 bytes."""
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    (s0, s1), (m0, m1) = s.split(4, -1), m.split(4, -1)
    return torch.cat([s0 | s1 >> 4 << 6, m0 | m1 >> 4 << 6, s1 & 15 | (m1 & 15) << 4], -1)


def k_groups(x: Array, most: int) -> tuple[Array, Array, Array, Array]:
    """Q4_K and Q5_K: bytes of d and m, of the groups' scales, and codes [..., 8, 32]."""
    groups = x.unflatten(-1, (8, 32))
    below = (-groups.amin(-1)).clamp(min=0)
    steps = (groups.amax(-1).clamp(min=0) + below) / most
    d, outer = half(steps.amax(-1) / 63)
    m, outer_minimum = half(below.amax(-1) / 63)
    scales = divided(steps, outer[..., None]).round().clamp(0, 63)
    minima = divided(below, outer_minimum[..., None]).round().clamp(0, 63)
    scale, minimum = (outer[..., None] * scales)[..., None], (outer_minimum[..., None] * minima)[..., None]
    codes = divided(groups + minimum, scale).round().clamp(0, most).to(torch.uint8)
    return d, m, six_bits(scales, minima), codes


def pairs(codes: Array) -> Array:
    """Every two groups of 32 in the nibbles of 32 bytes."""
    return nibbles(codes.flatten(-2).unflatten(-1, (-1, 64))).flatten(-2)


def q4_k(x: Array) -> Array:
    d, m, scales, codes = k_groups(x, 15)
    return torch.cat([d, m, scales, pairs(codes)], -1)


def q5_k(x: Array) -> Array:
    d, m, scales, codes = k_groups(x, 31)
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device)[:, None]
    fifth = (codes >> 4 << shifts).sum(-2, dtype=torch.uint8)
    return torch.cat([d, m, scales, fifth, pairs(codes & 15)], -1)


def q6_k(x: Array) -> Array:
    groups = x.unflatten(-1, (16, 16))
    steps = extreme(groups) / -32
    d, outer = half(extreme(steps) / -128)
    scales = divided(steps, outer[..., None]).round().clamp(-128, 127)
    codes = divided(groups, (outer[..., None] * scales)[..., None]).round().clamp(-32, 31) + 32
    codes = codes.to(torch.uint8).flatten(-2).unflatten(-1, (2, 128))
    low = nibbles(codes & 15).flatten(-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=x.device)[:, None]
    high = ((codes >> 4).unflatten(-1, (4, 32)) << shifts).sum(-2, dtype=torch.uint8).flatten(-2)
    return torch.cat([low, high, scales.to(torch.int8).view(torch.uint8), d], -1)


FORMATS: dict[str, tuple[int, Callable[[Array], Array]]] = {  # values of a block, and what packs blocks
    "Q8_0": (32, q8_0),
    "Q4_0": (32, q4_0),
    "Q4_1": (32, q4_1),
    "Q4_K": (256, q4_k),
    "Q5_K": (256, q5_k),
    "Q6_K": (256, q6_k),
}


def requantized(values: Array, name: str) -> Array:
    """Bytes of float32 values [rows, width]."""
    size, pack = FORMATS[name]
    return pack(values.float().unflatten(-1, (-1, size))).flatten()
