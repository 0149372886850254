"""Defines the bytes of GGUF's i-quants and ternary formats.

Each format reduces to a table of at most 16 numbers and a small integer scale for every 16 or 32 values:
    value = d * scale * factor * table[code]
`split_blocks` returns d, scales and codes, which fast kernels store without rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = Any  # an ndarray; NumPy's types do not cover structured fields

LAYOUTS = {
    "IQ1_S": np.dtype([("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)]),
    "IQ1_M": np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)]),
    "IQ2_XXS": np.dtype([("d", "<f2"), ("runs", [("qs", "u1", 4), ("signs", "<u4")], 8)]),
    "IQ2_XS": np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)]),
    "IQ2_S": np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)]),
    "IQ3_XXS": np.dtype([("d", "<f2"), ("qs", "u1", 64), ("signs", "<u4", 8)]),
    "IQ3_S": np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)]),
    "TQ1_0": np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")]),
    "TQ2_0": np.dtype([("qs", "u1", 64), ("d", "<f2")]),
}

TEXT = Path(__file__).with_name("code_books.inc")

# In the text's order: levels per value, values per point
BOOKS = {"IQ2_XXS": (3, 8), "IQ2_XS": (3, 8), "IQ2_S": (3, 8), "IQ1_S": (3, 8), "IQ3_XXS": (8, 4), "IQ3_S": (8, 4)}

TWO_BITS = (8, 25, 43, 0, -8, -25, -43, 0)  # level and sign
ONE_BIT = (-7, 1, 9, 0, -9, -1, 7, 0)  # eight times -1, 0 or 1, plus or minus an eighth
TERNARY = (-1, 0, 1, 2)

TABLES = {
    "IQ1_S": ONE_BIT,
    "IQ1_M": ONE_BIT,
    "IQ2_XXS": TWO_BITS,
    "IQ2_XS": TWO_BITS,
    "IQ2_S": TWO_BITS,
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62),
    "IQ3_S": tuple(range(-15, 16, 2)),
    "TQ1_0": TERNARY,
    "TQ2_0": TERNARY,
}

FACTORS = dict.fromkeys(TABLES, 0.125) | {"IQ3_XXS": 0.25, "IQ3_S": 1.0, "TQ1_0": 1.0, "TQ2_0": 1.0}


class SplitBlocks(NamedTuple):
    """Holds the factors and codes of some storage blocks."""

    d: Array  # [blocks] float16
    scales: Array  # [blocks, 1, 8 or 16]
    codes: Array  # [blocks, 256]


def values_of(name: str, blocks: Array) -> NDArray[np.float32]:
    d, scales, codes = split_blocks(name, blocks)
    numbers = np.array(TABLES[name], np.float32)[codes].reshape(*scales.shape, -1)
    scale = d.astype(np.float32)[:, None] * (scales * np.float32(FACTORS[name]))
    values: NDArray[np.float32] = (scale[..., None] * numbers).reshape(codes.shape)
    return values


def split_blocks(name: str, blocks: Array) -> SplitBlocks:
    d, scales, codes = SPLIT[name](blocks)
    return SplitBlocks(
        d, scales.reshape(len(blocks), -1).astype(np.int8), codes.reshape(len(blocks), -1).astype(np.uint8)
    )


def fields(packed: Array, shifts: tuple[int, ...], mask: int) -> Array:
    return packed[..., None] >> np.array(shifts, packed.dtype) & packed.dtype.type(mask)


def odd(scales: Array) -> Array:
    return 2 * scales + 1


def nibbles(scales: Array) -> Array:
    return odd(fields(scales, (0, 4), 15))


def sign_bits(signs: Array) -> Array:
    return fields(signs.astype(np.uint8), tuple(range(8)), 1)


def even_sign_bits(signs: Array) -> Array:
    """Returns a bit for each of 8 values from 7-bit numbers; the 8th makes the number of set bits even."""
    return sign_bits(signs | (np.bitwise_count(signs) & 1).astype(signs.dtype) << 7)


def iq1_s(blocks: Array) -> tuple[Array, Array, Array]:
    qh = blocks["qh"]  # [b, 8]
    points = blocks["qs"] | (fields(qh, (0, 3, 6, 9), 7) << 8).reshape(-1, 32)
    levels = code_books()["IQ1_S"][points].reshape(-1, 8, 32)
    return blocks["d"], odd(qh >> 12 & 7), levels + 4 * (qh >> 15)[..., None]


def iq1_m(blocks: Array) -> tuple[Array, Array, Array]:
    scales = blocks["scales"]
    d = (fields(scales, (12,), 15)[..., 0] << np.array([0, 4, 8, 12], np.uint16)).sum(-1, dtype=np.uint16)
    qh = fields(blocks["qh"], (0, 4), 15).reshape(-1, 32).astype(np.uint16)
    levels = code_books()["IQ1_S"][blocks["qs"] | (qh & 7) << 8]
    return d.view(np.float16), odd(fields(scales, (0, 3, 6, 9), 7)), levels + 4 * (qh >> 3)[..., None]


def iq2_xxs(blocks: Array) -> tuple[Array, Array, Array]:
    signs = blocks["runs"]["signs"]
    levels = code_books()["IQ2_XXS"][blocks["runs"]["qs"]]
    return blocks["d"], odd(signs >> 28), levels + 4 * even_sign_bits(fields(signs, (0, 7, 14, 21), 127))


def iq2_xs(blocks: Array) -> tuple[Array, Array, Array]:
    levels = code_books()["IQ2_XS"][blocks["qs"] & 511]
    return blocks["d"], nibbles(blocks["scales"]), levels + 4 * even_sign_bits(blocks["qs"] >> 9)


def iq2_s(blocks: Array) -> tuple[Array, Array, Array]:
    high = fields(blocks["qh"], (0, 2, 4, 6), 3).reshape(-1, 32).astype(np.uint16)
    levels = code_books()["IQ2_S"][blocks["qs"] | high << 8]
    return blocks["d"], nibbles(blocks["scales"]), levels + 4 * sign_bits(blocks["signs"])


def iq3_xxs(blocks: Array) -> tuple[Array, Array, Array]:
    signs = even_sign_bits(fields(blocks["signs"], (0, 7, 14, 21), 127)).reshape(-1, 64, 4)
    return blocks["d"], odd(blocks["signs"] >> 28), code_books()["IQ3_XXS"][blocks["qs"]] + 8 * signs


def iq3_s(blocks: Array) -> tuple[Array, Array, Array]:
    high = sign_bits(blocks["qh"]).reshape(-1, 64).astype(np.uint16)
    levels = code_books()["IQ3_S"][blocks["qs"] | high << 8]
    signs = sign_bits(blocks["signs"]).reshape(-1, 64, 4)
    return blocks["d"], nibbles(blocks["scales"]), np.where(signs, 7 - levels, 8 + levels)


def digits(packed: Array, count: int) -> Array:
    """Returns base-3 digits of bytes that are fractions of 256: all first digits, then all second ones: [b, n]."""
    moved = packed[:, None] * (3 ** np.arange(count, dtype=np.uint8))[:, None]
    return (moved.astype(np.uint16) * 3 >> 8).reshape(len(packed), -1)


def tq1_0(blocks: Array) -> tuple[Array, Array, Array]:
    first, second = blocks["qs"][:, :32], blocks["qs"][:, 32:]
    codes = [digits(first, 5), digits(second, 5), digits(blocks["qh"], 4)]
    return blocks["d"], np.ones((len(blocks), 8)), np.concatenate(codes, 1)


def tq2_0(blocks: Array) -> tuple[Array, Array, Array]:
    codes = fields(blocks["qs"].reshape(-1, 2, 32), (0, 2, 4, 6), 3).swapaxes(2, 3)
    return blocks["d"], np.ones((len(blocks), 8)), codes


SPLIT: dict[str, Callable[[Array], tuple[Array, Array, Array]]] = {
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
}


@lru_cache(maxsize=1)
def code_books() -> dict[str, NDArray[np.uint8]]:
    """Returns the levels of each book's points, in order: [points, values]."""
    lines = TEXT.read_text().splitlines()
    words = [int(word, 16) for line in lines if line.startswith("0x") for word in line.replace(",", "").split()]
    bits = np.unpackbits(np.array(words, "<u8").view(np.uint8), bitorder="little")
    books, at = {}, 0
    for name, (levels, values) in BOOKS.items():
        points = np.flatnonzero(bits[at : at + levels**values])
        books[name] = (points[:, None] // levels ** np.arange(values) % levels).astype(np.uint8)
        at += -(-(levels**values) // 64) * 64
    return books
