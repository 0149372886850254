"""Formats with code books and ternary ones, taken apart on the device: what model/iquants.py defines, as `Parts`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from penstock.backend.cuda.quant_blocks import Array, Coding, Parts, fields_of_runs, half_at, line, one_each
from penstock.model import iquants
from penstock.model.code_books import code_books


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
def book(name: str, device: torch.device) -> Array:
    return torch.from_numpy(code_books()[name]).to(device)


def levels(name: str, points: Array) -> Array:
    return book(name, points.device)[points.int()]


def number(packed: Array) -> Array:
    """Of two or four bytes, lowest first."""
    shifts = torch.arange(0, 8 * packed.shape[-1], 8, device=packed.device)
    return (packed.long() << shifts).sum(-1)


def pieces(numbers: Array, shifts: tuple[int, ...], mask: int) -> Array:
    """Parts of each number, as the last axis."""
    return numbers[..., None] >> torch.tensor(shifts, device=numbers.device) & mask


def eight(signs: Array) -> Array:
    """A bit of each of 8 values."""
    return signs.to(torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8, device=signs.device) & 1


def sevens(signs: Array) -> Array:
    """The same of numbers of 7 bits: of 8 values an even number is negative."""
    parity = signs ^ signs >> 4
    parity = parity ^ parity >> 2
    return eight(signs | ((parity ^ parity >> 1) & 1) << 7)


def nibbles(scales: Array) -> Array:
    return fields_of_runs(scales, 1, 4)


def parts(codes: Array, scales: Array, d: Array) -> Parts:
    """Codes [rows, blocks, ...]; of the scales, what an odd number is twice of, less one."""
    odd = (2 * scales.flatten(2) + 1).to(torch.int8)
    return Parts(line(codes.flatten(2)), one_each(odd), d)


def iq1_s(blocks: Array) -> Parts:
    high = number(blocks[..., 34:].unflatten(-1, (8, 2)))  # [rows, blocks, 8]
    points = blocks[..., 2:34] | pieces(high, (0, 3, 6, 9), 7).flatten(-2) << 8
    lower = (high >> 15).to(torch.uint8)[..., None]
    return parts(
        levels("IQ1_S", points).flatten(-2).unflatten(-1, (8, 32)) | lower << 2, high >> 12 & 7, half_at(blocks, 0)
    )


def iq1_m(blocks: Array) -> Parts:
    scales = number(blocks[..., 48:].unflatten(-1, (4, 2)))  # [rows, blocks, 4]
    d = (scales >> 12 << torch.tensor([0, 4, 8, 12], device=blocks.device)).sum(-1, keepdim=True)
    high = nibbles(blocks[..., 32:48])
    codes = levels("IQ1_S", blocks[..., :32] | (high & 7).long() << 8) | (high >> 3 << 2)[..., None]
    return parts(codes, pieces(scales, (0, 3, 6, 9), 7), d.to(torch.int16).view(torch.float16))


def iq2_xxs(blocks: Array) -> Parts:
    points, signs = blocks[..., 2:].unflatten(-1, (8, 8)).split(4, -1)
    signs = number(signs)  # [rows, blocks, 8]
    codes = levels("IQ2_XXS", points) | sevens(pieces(signs, (0, 7, 14, 21), 127)) << 2
    return parts(codes, signs >> 28, half_at(blocks, 0))


def iq2_xs(blocks: Array) -> Parts:
    both = number(blocks[..., 2:66].unflatten(-1, (32, 2)))
    return parts(levels("IQ2_XS", both & 511) | sevens(both >> 9) << 2, nibbles(blocks[..., 66:]), half_at(blocks, 0))


def iq2_s(blocks: Array) -> Parts:
    points, signs, high, scales = blocks[..., 2:].split([32, 32, 8, 8], -1)
    codes = levels("IQ2_S", points | fields_of_runs(high, 1, 2).long() << 8) | eight(signs) << 2
    return parts(codes, nibbles(scales), half_at(blocks, 0))


def iq3_xxs(blocks: Array) -> Parts:
    signs = number(blocks[..., 66:].unflatten(-1, (8, 4)))
    negative = sevens(pieces(signs, (0, 7, 14, 21), 127)).flatten(2)
    return parts(levels("IQ3_XXS", blocks[..., 2:66]).flatten(2) | negative << 3, signs >> 28, half_at(blocks, 0))


def iq3_s(blocks: Array) -> Parts:
    points, high, signs, scales = blocks[..., 2:].split([64, 8, 32, 4], -1)
    level = levels("IQ3_S", points | fields_of_runs(high, 1, 1).long() << 8).flatten(2)
    codes = torch.where(eight(signs).flatten(2) > 0, 7 - level, 8 + level)
    taken = parts(codes, nibbles(scales), half_at(blocks, 0))
    return taken._replace(scales=2 * taken.scales)


def digits(packed: Array, count: int) -> Array:
    """In base 3, of bytes that are fractions of 256: all first ones, then all second ones."""
    powers = torch.tensor([3**k for k in range(count)], dtype=torch.uint8, device=packed.device)[:, None]
    return ((packed[..., None, :] * powers).short() * 3 >> 8).flatten(-2).to(torch.uint8)


def tq1_0(blocks: Array) -> Parts:
    first, second, third, _ = blocks.split([32, 16, 4, 2], -1)
    codes = torch.cat([digits(first, 5), digits(second, 5), digits(third, 4)], -1)
    return parts(codes, torch.zeros_like(blocks[..., :8]), half_at(blocks, 52))


def tq2_0(blocks: Array) -> Parts:
    return parts(fields_of_runs(blocks[..., :64], 32, 2), torch.zeros_like(blocks[..., :8]), half_at(blocks, 64))


TAKE: dict[str, Callable[[Array], Parts]] = {
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
