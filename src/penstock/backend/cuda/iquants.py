"""Splits i-quants and ternary formats, as model/gguf/iquants.py defines them, into codes and scales on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from penstock.backend.cuda.quant_blocks import Array, Coding, QuantBlocks, fields_of_runs, half_at, line, one_each
from penstock.model.gguf import iquants
from penstock.model.gguf.iquants import code_books


def tabled(name: str, group: int) -> Coding:
    table = tuple(number * iquants.FACTORS[name] for number in iquants.TABLES[name])
    return Coding(4, group, False, 0, bytes=True, table=table)


TERNARY = Coding(4, 32, False, 1, bytes=True)

CODINGS = {
    "IQ1_S": tabled("IQ1_S", 32),
    "IQ1_M": tabled("IQ1_M", 16),
    "IQ2_XXS": tabled("IQ2_XXS", 32),
    "IQ2_XS": tabled("IQ2_XS", 16),
    "IQ2_S": tabled("IQ2_S", 16),
    "IQ3_XXS": tabled("IQ3_XXS", 32),
    "IQ3_S": Coding(4, 32, False, 7.5, bytes=True),  # odd numbers: twice as large scales, and half of them
    "TQ1_0": TERNARY,
    "TQ2_0": TERNARY,
}


@lru_cache(maxsize=32)
def code_book(name: str, device: torch.device) -> Array:
    return torch.from_numpy(code_books()[name]).to(device)


def levels(name: str, points: Array) -> Array:
    return code_book(name, points.device)[points.int()]


def number(packed: Array) -> Array:
    """Combines two or four bytes, lowest first, into a number."""
    shifts = torch.arange(0, 8 * packed.shape[-1], 8, device=packed.device)
    return (packed.long() << shifts).sum(-1)


def pieces(numbers: Array, shifts: tuple[int, ...], mask: int) -> Array:
    return numbers[..., None] >> torch.tensor(shifts, device=numbers.device) & mask


def sign_bits(signs: Array) -> Array:
    return signs.to(torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8, device=signs.device) & 1


def even_sign_bits(signs: Array) -> Array:
    """Returns a bit for each of 8 values from numbers of 7 bits: an even number of bits is set."""
    parity = signs ^ signs >> 4
    parity = parity ^ parity >> 2
    return sign_bits(signs | ((parity ^ parity >> 1) & 1) << 7)


def nibbles(scales: Array) -> Array:
    return fields_of_runs(scales, 1, 4)


def quant_blocks(codes: Array, scales: Array, d: Array) -> QuantBlocks:
    """Returns the blocks, given codes [rows, blocks, ...], scales s that stand for 2 * s + 1, and factors of blocks."""
    odd = (2 * scales.flatten(2) + 1).to(torch.int8)
    return QuantBlocks(line(codes.flatten(2)), one_each(odd), d)


def iq1_s(blocks: Array) -> QuantBlocks:
    high = number(blocks[..., 34:].unflatten(-1, (8, 2)))  # [rows, blocks, 8]
    points = blocks[..., 2:34] | pieces(high, (0, 3, 6, 9), 7).flatten(-2) << 8
    lower = (high >> 15).to(torch.uint8)[..., None]
    return quant_blocks(
        levels("IQ1_S", points).flatten(-2).unflatten(-1, (8, 32)) | lower << 2, high >> 12 & 7, half_at(blocks, 0)
    )


def iq1_m(blocks: Array) -> QuantBlocks:
    scales = number(blocks[..., 48:].unflatten(-1, (4, 2)))  # [rows, blocks, 4]
    d = (scales >> 12 << torch.tensor([0, 4, 8, 12], device=blocks.device)).sum(-1, keepdim=True)
    high = nibbles(blocks[..., 32:48])
    codes = levels("IQ1_S", blocks[..., :32] | (high & 7).long() << 8) | (high >> 3 << 2)[..., None]
    return quant_blocks(codes, pieces(scales, (0, 3, 6, 9), 7), d.to(torch.int16).view(torch.float16))


def iq2_xxs(blocks: Array) -> QuantBlocks:
    points, signs = blocks[..., 2:].unflatten(-1, (8, 8)).split(4, -1)
    signs = number(signs)  # [rows, blocks, 8]
    codes = levels("IQ2_XXS", points) | even_sign_bits(pieces(signs, (0, 7, 14, 21), 127)) << 2
    return quant_blocks(codes, signs >> 28, half_at(blocks, 0))


def iq2_xs(blocks: Array) -> QuantBlocks:
    both = number(blocks[..., 2:66].unflatten(-1, (32, 2)))
    return quant_blocks(
        levels("IQ2_XS", both & 511) | even_sign_bits(both >> 9) << 2, nibbles(blocks[..., 66:]), half_at(blocks, 0)
    )


def iq2_s(blocks: Array) -> QuantBlocks:
    points, signs, high, scales = blocks[..., 2:].split([32, 32, 8, 8], -1)
    codes = levels("IQ2_S", points | fields_of_runs(high, 1, 2).long() << 8) | sign_bits(signs) << 2
    return quant_blocks(codes, nibbles(scales), half_at(blocks, 0))


def iq3_xxs(blocks: Array) -> QuantBlocks:
    signs = number(blocks[..., 66:].unflatten(-1, (8, 4)))
    negative = even_sign_bits(pieces(signs, (0, 7, 14, 21), 127)).flatten(2)
    return quant_blocks(
        levels("IQ3_XXS", blocks[..., 2:66]).flatten(2) | negative << 3, signs >> 28, half_at(blocks, 0)
    )


def iq3_s(blocks: Array) -> QuantBlocks:
    points, high, signs, scales = blocks[..., 2:].split([64, 8, 32, 4], -1)
    level = levels("IQ3_S", points | fields_of_runs(high, 1, 1).long() << 8).flatten(2)
    codes = torch.where(sign_bits(signs).flatten(2) > 0, 7 - level, 8 + level)
    taken = quant_blocks(codes, nibbles(scales), half_at(blocks, 0))
    return taken._replace(scales=2 * taken.scales)


def digits(packed: Array, count: int) -> Array:
    """Returns digits in base 3 of bytes that are fractions of 256: all first digits, then all second ones."""
    powers = torch.tensor([3**k for k in range(count)], dtype=torch.uint8, device=packed.device)[:, None]
    return ((packed[..., None, :] * powers).short() * 3 >> 8).flatten(-2).to(torch.uint8)


def tq1_0(blocks: Array) -> QuantBlocks:
    first, second, third, _ = blocks.split([32, 16, 4, 2], -1)
    codes = torch.cat([digits(first, 5), digits(second, 5), digits(third, 4)], -1)
    return quant_blocks(codes, torch.zeros_like(blocks[..., :8]), half_at(blocks, 52))


def tq2_0(blocks: Array) -> QuantBlocks:
    return quant_blocks(fields_of_runs(blocks[..., :64], 32, 2), torch.zeros_like(blocks[..., :8]), half_at(blocks, 64))


SPLIT: dict[str, Callable[[Array], QuantBlocks]] = dict(
    zip(iquants.LAYOUTS, (iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s, tq1_0, tq2_0), strict=True)
)
