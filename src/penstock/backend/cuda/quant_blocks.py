"""Defines what quantized rows are split into: codes and scales, and how values are computed from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from penstock.backend.cuda.storage import COLUMNS

Array = Any  # a torch tensor


class Coding(NamedTuple):
    """Says how codes become values: scale * (code - zero) + minimum, or scale * table[code]."""

    bits: int
    group: int  # columns that share a scale
    minima: bool
    zero: float
    bytes: bool = False  # scales and minima are signed bytes, which a float16 for every 256 columns multiplies
    e4m3: bool = False  # scales are floats of 8 bits without a sign, of which kernels read the 256th
    e8m0: bool = False  # scales are powers of two of 8 bits
    table: tuple[float, ...] = ()  # values of 4-bit codes: up to 16, each exact in bfloat16
    scaled_minima: bool = False  # minima are zero points with their sign changed, which scales multiply
    factor: float = 1.0  # multiplies all values

    @property
    def shift(self) -> int:
        """Returns by how much codes are higher in kernels than they are."""
        return 0 if self.table else -128 if self.bits == 8 else 128

    @property
    def groups(self) -> int:
        return COLUMNS // self.group


class QuantBlocks(NamedTuple):
    """Holds rows that are split into codes and scales. Minima follow their scales, if there are any."""

    codes: Array  # [rows, width] uint8
    scales: Array  # [rows, groups, 1 or 2] float16, int8 or uint8
    supers: Array | None = None  # [rows, width / 256, 1 or 2] float16


def half_at(blocks: Array, place: int) -> Array:
    """Returns the float16 at a byte of each block: [rows, blocks, 1]."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16)


def fields(packed: Array, bits: int) -> Array:
    """Splits each byte into fields of `bits` bits, lowest first: [..., n] -> [..., 8 / bits * n]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed[..., None, :] >> shifts & ((1 << bits) - 1)).flatten(-2)


def fields_of_runs(packed: Array, run: int, bits: int) -> Array:
    """Splits the bytes of each run of `run` bytes into fields, as `fields` does, one run after the other."""
    return fields(packed.unflatten(-1, (-1, run)), bits).flatten(-2)


def line(blocks: Array) -> Array:
    return blocks.flatten(-2)


def one_each(scales: Array) -> Array:
    """Returns scales without minima, [rows, blocks, scales], in the shape that `QuantBlocks` has."""
    return scales.flatten(1)[..., None]
