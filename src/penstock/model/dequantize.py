"""Defines the bytes of every format. Fast kernels are tested against this module.

A row is a sequence of storage blocks. `LAYOUTS` describes the fields of one block, and `VALUES` decodes it. Rare
formats with code books are in iquants.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.model.formats.fp8 import expand_scales, fp8_values
from penstock.model.tensor import AFFINE, FORMATS, FP8, AffineFormat, Tensor

Array = Any  # an ndarray; NumPy's types do not cover structured fields


def affine_layout(affine: AffineFormat) -> np.dtype[np.void]:
    """Returns the layout of a block. 8-bit codes are bytes; others have 4 bits in qs and the rest in qh."""
    low = 8 if affine.bits == 8 else 4
    high = affine.bits - low
    fields: list[Any] = [("d", "<f2"), ("z" if affine.zeros else "m", "<f2"), ("qs", "u1", affine.values * low // 8)]
    return np.dtype([*fields, ("qh", "u1", affine.values * high // 8)] if high else fields)


LAYOUTS = {
    "F32": np.dtype([("x", "<f4")]),
    "F16": np.dtype([("x", "<f2")]),
    "BF16": np.dtype([("x", "<u2")]),
    "Q4_0": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]),
    "Q5_0": np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q5_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q8_0": np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    "Q2_K": np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("m", "<f2")]),
    "Q3_K": np.dtype([("qh", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")]),
    "Q4_K": np.dtype([("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)]),
    "Q5_K": np.dtype([("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]),
    "Q6_K": np.dtype([("qs", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]),
    "IQ4_NL": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "IQ4_XS": np.dtype([("d", "<f2"), ("scales_h", "u1", 2), ("scales_l", "u1", 4), ("qs", "u1", 128)]),
    "MXFP4": np.dtype([("e", "u1"), ("qs", "u1", 16)]),
    "I8": np.dtype([("x", "i1")]),
    "NF4": np.dtype([("d", "<f4"), ("qs", "u1", 16)]),
    "NVFP4": np.dtype([("scales", "u1", 4), ("qs", "u1", (4, 8))]),
    **{name: affine_layout(affine) for name, affine in AFFINE.items()},
}

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# doubled, because e2m1 has halves
FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)

NF4_VALUES = np.array(  # quantiles of a normal distribution, normalized to 1
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


def dequantize(tensor: Tensor) -> NDArray[np.float32]:
    if tensor.format.name in FP8:
        return fp8_values(tensor.data, tensor.format.name, tensor.shape, tensor.scales)
    blocks = tensor.data.view(layout_of(tensor.format.name))
    with np.errstate(invalid="ignore", over="ignore"):  # scales of a damaged file may not be finite
        values: NDArray[np.float32] = values_of(tensor.format.name, blocks).reshape(tensor.shape)
        return values if tensor.scales is None else values * expand_scales(tensor.scales, tensor.shape)


def layout_of(format_name: str) -> np.dtype[np.void]:
    if format_name in LAYOUTS or format_name not in FORMATS:
        return LAYOUTS.get(format_name, LAYOUTS["F32"])
    from penstock.model.gguf import iquants

    return iquants.LAYOUTS[format_name]


def values_of(format_name: str, blocks: Array) -> Array:
    if format_name in VALUES or format_name not in FORMATS:
        return VALUES.get(format_name, VALUES["F32"])(blocks)
    from penstock.model.gguf import iquants

    return iquants.values_of(format_name, blocks)


def bits(packed: Array, width: int) -> Array:
    """Splits each byte into fields of `width` bits, lowest first: [..., n] -> [..., 8 / width, n]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return packed[..., None, :] >> shifts & ((1 << width) - 1)


def flat_bits(packed: Array, width: int) -> Array:
    """Returns all lowest fields, then all next ones: [b, n] -> [b, n * 8 / width]."""
    return bits(packed, width).reshape(len(packed), -1)


def column(blocks: Array, field: str) -> Array:
    """Returns one number per block: [b, 1]."""
    return blocks[field].astype(np.float32)[:, None]


def bf16(blocks: Array) -> Array:
    return (blocks["x"].astype(np.uint32) << 16).view(np.float32)


def q4_0(blocks: Array) -> Array:
    return column(blocks, "d") * (flat_bits(blocks["qs"], 4).astype(np.float32) - 8)


def q4_1(blocks: Array) -> Array:
    return column(blocks, "d") * flat_bits(blocks["qs"], 4) + column(blocks, "m")


def fifth_bit(blocks: Array) -> Array:
    """Adds the fifth bit in qh to the 4-bit codes in qs, lowest bit first: [b, 32]."""
    high = np.unpackbits(blocks["qh"], axis=-1, bitorder="little")
    return flat_bits(blocks["qs"], 4) | high << 4


def q5_0(blocks: Array) -> Array:
    return column(blocks, "d") * (fifth_bit(blocks).astype(np.float32) - 16)


def q5_1(blocks: Array) -> Array:
    return column(blocks, "d") * fifth_bit(blocks) + column(blocks, "m")


def q8_0(blocks: Array) -> Array:
    return column(blocks, "d") * blocks["qs"]


def q2_k(blocks: Array) -> Array:
    scale = column(blocks, "d") * (blocks["scales"] & 15)
    minimum = column(blocks, "m") * (blocks["scales"] >> 4)
    q = bits(blocks["qs"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return scale[..., None] * q - minimum[..., None]


def q3_k(blocks: Array) -> Array:
    """Reads 16 groups of 16, each with a signed 6-bit scale; a value's third bit, when clear, subtracts 4."""
    low = flat_bits(blocks["scales"][:, :8], 4)
    high = flat_bits(blocks["scales"][:, 8:], 2)
    scale = column(blocks, "d") * ((low | high << 4).astype(np.float32) - 32)
    third = bits(blocks["qh"], 1).reshape(-1, 16, 16)
    q = bits(blocks["qs"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return scale[..., None] * ((q | third << 2).astype(np.float32) - 4)


def six_bit_pairs(scales: Array) -> tuple[Array, Array]:
    """Unpacks 8 scales and 8 minima of 6 bits from 12 bytes: [b, 12] -> 2 * [b, 8]. The first four of each are the low
    bits of bytes 0-3 and 4-7, whose top bits belong to the last four; bytes 8-11 hold the nibbles of the last four.
    """
    first, second, nibbles = scales[:, :4], scales[:, 4:8], scales[:, 8:]
    scale = np.concatenate([first & 63, nibbles & 15 | first >> 6 << 4], axis=1)
    minimum = np.concatenate([second & 63, nibbles >> 4 | second >> 6 << 4], axis=1)
    return scale, minimum


def scaled_groups(blocks: Array, q: Array) -> Array:
    scale, minimum = six_bit_pairs(blocks["scales"])
    return (column(blocks, "d") * scale)[..., None] * q - (column(blocks, "m") * minimum)[..., None]


def q4_k(blocks: Array) -> Array:
    return scaled_groups(blocks, bits(blocks["qs"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def q5_k(blocks: Array) -> Array:
    low = bits(blocks["qs"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return scaled_groups(blocks, low | bits(blocks["qh"], 1) << 4)


def q6_k(blocks: Array) -> Array:
    low = bits(blocks["qs"].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
    high = bits(blocks["qh"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    scale = column(blocks, "d") * blocks["scales"]
    return scale[..., None] * ((low | high << 4).astype(np.float32) - 32)


def iq4_nl(blocks: Array) -> Array:
    return column(blocks, "d") * IQ4_VALUES[flat_bits(blocks["qs"], 4)]


def iq4_xs(blocks: Array) -> Array:
    """Reads 8 groups of 32, each with a signed 6-bit scale whose low and high bits are stored separately."""
    low = bits(blocks["scales_l"], 4).swapaxes(1, 2).reshape(-1, 8)
    high = bits(blocks["scales_h"], 2).swapaxes(1, 2).reshape(-1, 8)
    scale = column(blocks, "d") * ((low | high << 4).astype(np.float32) - 32)
    return scale[..., None] * IQ4_VALUES[bits(blocks["qs"].reshape(-1, 8, 16), 4).reshape(-1, 8, 32)]


def mxfp4(blocks: Array) -> Array:
    scale = np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128)[:, None]  # half of 2 ** (e - 127)
    return scale * FP4_VALUES[flat_bits(blocks["qs"], 4)]


def nvfp4(blocks: Array) -> Array:
    exponent, mantissa = blocks["scales"] >> 3 & 15, blocks["scales"] & 7
    significand = np.where(exponent > 0, 8 + mantissa, 2 * mantissa).astype(np.float32)
    scale = np.ldexp(np.where(blocks["scales"] == 0x7F, 0, significand), exponent.astype(np.int32) - 11)
    return scale[..., None] * FP4_VALUES[bits(blocks["qs"], 4).reshape(-1, 4, 16)]


def affine_values(affine: AffineFormat, blocks: Array) -> Array:
    codes = blocks["qs"] if affine.bits == 8 else flat_bits(blocks["qs"], 4)
    if "qh" in blocks.dtype.names:
        codes = codes | flat_bits(blocks["qh"], affine.bits - 4) << 4
    if affine.zeros:
        return column(blocks, "d") * (codes - column(blocks, "z"))
    return column(blocks, "d") * codes + column(blocks, "m")


VALUES: dict[str, Callable[[Array], Array]] = {
    "F32": lambda blocks: blocks["x"].astype(np.float32),
    "F16": lambda blocks: blocks["x"].astype(np.float32),
    "BF16": bf16,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
    "I8": lambda blocks: blocks["x"].astype(np.float32),
    "NF4": lambda blocks: column(blocks, "d") * NF4_VALUES[flat_bits(blocks["qs"], 4)],
    "NVFP4": nvfp4,
    **{name: partial(affine_values, affine) for name, affine in AFFINE.items()},
}
