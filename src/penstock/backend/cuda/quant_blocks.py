"""Quantized rows taken apart: codes, scales, and how values are made of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

ROWS, COLUMNS = 16, 64  # of a tile, as quantize.py packs them

Array = Any  # a torch tensor


class Coding(NamedTuple):
    """How codes become values: scale * (code - zero) + minimum, or scale * table[code]."""

    bits: int
    group: int  # columns that share a scale
    minima: bool
    zero: float
    bytes: bool = False  # scales and minima are signed bytes, and float16 for every 256 columns multiply them
    bfloat: bool = False  # scales of 16 bits are bfloat16 instead of float16
    table: tuple[float, ...] = ()  # of codes of 4 bits: up to 16 numbers, each exact in bfloat16

    @property
    def shifted(self) -> bool:
        """Whether kernels see codes 128 higher than they are."""
        return self.bits < 8 and not self.table

    @property
    def groups(self) -> int:
        """In a tile."""
        return COLUMNS // self.group


class Parts(NamedTuple):
    """Rows taken apart. The minima stand beside the scales, where there are any."""

    codes: Array  # [rows, width] uint8
    scales: Array  # [rows, groups, 1 or 2] float16, bfloat16 or int8
    supers: Array | None = None  # [rows, width / 256, 1 or 2] float16


def half_at(blocks: Array, place: int) -> Array:
    return blocks[..., place : place + 2].contiguous().view(torch.float16)  # [rows, blocks, 1]


def fields(packed: Array, bits: int) -> Array:
    """Fields of `bits` bits of each byte, lowest first: [..., n] -> [..., 8 / bits * n]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed[..., None, :] >> shifts & ((1 << bits) - 1)).flatten(-2)


def fields_of_runs(packed: Array, run: int, bits: int) -> Array:
    """The same of each run of bytes."""
    return fields(packed.unflatten(-1, (-1, run)), bits).flatten(-2)


def line(blocks: Array) -> Array:
    """Codes of blocks [rows, blocks, codes] in one line for each row."""
    return blocks.flatten(-2)


def one_each(scales: Array) -> Array:
    """Scales without minima of blocks [rows, blocks, scales], as `Parts` has them."""
    return scales.flatten(1)[..., None]
