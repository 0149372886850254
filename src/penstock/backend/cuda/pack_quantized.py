"""Quantized matrices packed for the GPU: codes lie as the tensor cores read them, scales beside them.

A matrix is cut into tiles of 16 rows and 64 columns, of four steps c of 16 columns. Of each step, lane 4 * g + t of a
warp owns rows g and g + 8 (`half` 0, 1) at columns 2 * t + e and 2 * t + 8 + e (`side` 0, 1; e 0, 1).
    low     4 words of a lane: 4 bits of the codes of step c in word c, those of (side, half, e) from bit
            8 * side + 4 * half + 16 * e on, or 16 * side + 8 * half + 4 * e where a table has their values.
            Codes of 8 bits: 8 words (c, side) of bytes (half, e), 4 of them apart.
    high    a word of a lane with the fifth bits, or two words with the fifth and sixth, in the same order
    scales  of each g: (group of columns, half, scale or minimum). 16 bits each, or bytes that `supers` multiply.
    supers  of each g: (half, scale or minimum), float16 for every 256 columns
Nothing is rounded: what a format says is what the kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import log2

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backend.cuda import iquants
from penstock.backend.cuda.quant_blocks import (
    COLUMNS,
    ROWS,
    Array,
    Coding,
    Parts,
    fields,
    fields_of_runs,
    half_at,
    line,
    one_each,
)
from penstock.backend.cuda.transfer import Transfer
from penstock.model.dequantize import FP4_VALUES, IQ4_VALUES, NF4_VALUES
from penstock.model.tensor import FORMATS, NF4

AT_ONCE = 1 << 24  # values packed together: each takes some 20 bytes meanwhile

IQ4_TABLE = tuple(IQ4_VALUES.tolist())
FP4_TABLE = tuple(FP4_VALUES.tolist())
NF4_TABLE = tuple(torch.from_numpy(NF4_VALUES).bfloat16().tolist())

CODINGS = {
    "Q4_0": Coding(4, 32, False, 8),
    "Q4_1": Coding(4, 32, True, 0),
    "Q5_0": Coding(5, 32, False, 16),
    "Q5_1": Coding(5, 32, True, 0),
    "Q8_0": Coding(8, 32, False, 128),
    "Q4_K": Coding(4, 32, True, 0, bytes=True),
    "Q5_K": Coding(5, 32, True, 0, bytes=True),
    "Q6_K": Coding(6, 16, False, 32, bytes=True),
    "Q2_K": Coding(4, 16, True, 0, bytes=True),
    "Q3_K": Coding(4, 16, False, 4, bytes=True),
    "IQ4_NL": Coding(4, 32, False, 0, table=IQ4_TABLE),
    "IQ4_XS": Coding(4, 32, False, 0, bytes=True, table=IQ4_TABLE),
    "MXFP4": Coding(4, 32, False, 0, bfloat=True, table=FP4_TABLE),
    "NVFP4": Coding(4, 16, False, 0, bfloat=True, table=FP4_TABLE),
    "NF4": Coding(4, 32, False, 0, table=NF4_TABLE),
    "INT4": Coding(4, 64, True, 0),
} | iquants.CODINGS


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    coding: Coding
    rows: int
    width: int
    low: Array  # all int32: [rows of tiles, tiles, ...]
    high: Array | None
    scales: Array
    supers: Array | None
    factor: float = 1.0  # of all values: what products are multiplied with

    @property
    def tiles(self) -> int:
        """In a row of them."""
        return -(-self.width // COLUMNS)

    @property
    def bytes(self) -> int:
        return sum(4 * words.numel() for words in (self.low, self.high, self.scales, self.supers) if words is not None)


def pack(
    data: NDArray[np.uint8], format_name: str, rows: int, width: int, transfer: Transfer, factor: float = 1.0
) -> QuantizedWeight:
    """A checkpoint's bytes, moved to the device and packed there some rows at a time. Scales of a wide range take the
    power of two of the factor, so that products are as large as they will be."""
    coding = CODINGS[format_name]
    power = 2.0 ** round(log2(factor)) if coding.bfloat and factor > 0 else 1.0
    format = NF4 if format_name == NF4.name else FORMATS[format_name]
    lines = data.reshape(rows, width // format.values * format.bytes)

    def parts(first: int, last: int) -> Parts:
        blocks = transfer.fetch(lines[first:last].reshape(-1))
        taken = TAKE[format_name](blocks.view(last - first, -1, format.bytes))
        return taken if power == 1 else taken._replace(scales=taken.scales * power)

    return replace(pack_parts(parts, coding, rows, width), factor=factor / power)


def quantize_int4(values: Array) -> QuantizedWeight:
    """Values [rows, width] on the device, in groups of 64 from their lowest to their highest."""
    rows, width = values.shape
    return pack_parts(lambda first, last: int4_parts(values[first:last]), CODINGS["INT4"], rows, width)


def int4_parts(values: Array) -> Parts:
    rows, width = values.shape
    groups = -(-width // CODINGS["INT4"].group)
    padded = pad(values.float(), rows, groups * CODINGS["INT4"].group).view(rows, groups, -1)
    lowest = padded.amin(-1, keepdim=True).half()
    scale = ((padded.amax(-1, keepdim=True) - lowest) / 15).half()
    codes = ((padded - lowest) / scale.float().clamp(min=1e-8)).round().clamp(0, 15)
    return Parts(codes.to(torch.uint8).view(rows, -1)[:, :width], torch.cat([scale, lowest], -1))


# ---- formats ----


def take_4(blocks: Array, scales: int) -> Parts:
    """Q4_0 and Q4_1: float16 numbers, then nibbles."""
    numbers = [half_at(blocks, 2 * i) for i in range(scales)]
    return Parts(line(fields(blocks[..., 2 * scales :], 4)), torch.cat(numbers, -1))


def take_5(blocks: Array, scales: int) -> Parts:
    """Q5_0 and Q5_1: the fifth bits lie before the nibbles."""
    numbers = [half_at(blocks, 2 * i) for i in range(scales)]
    fifth, nibbles = blocks[..., 2 * scales :].split([4, 16], -1)
    return Parts(line(fields(nibbles, 4) | fields_of_runs(fifth, 1, 1) << 4), torch.cat(numbers, -1))


def take_8(blocks: Array) -> Parts:
    return Parts(line(blocks[..., 2:] ^ 128), half_at(blocks, 0))


def six_bit_pairs(packed: Array) -> Array:
    """8 scales and 8 minima in 12 bytes: [..., 12] -> [..., 8, 2] of int8."""
    first, second, nibbles = packed.split(4, -1)
    scales = torch.cat([first & 63, nibbles & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, nibbles >> 4 | second >> 6 << 4], -1)
    return torch.stack([scales, minima], -1).view(torch.int8)


def take_k(blocks: Array, fifth: bool) -> Parts:
    """Q4_K and Q5_K. What they call a minimum is taken away: its factor changes sign."""
    codes = fields_of_runs(blocks[..., 48:] if fifth else blocks[..., 16:], 32, 4)
    if fifth:
        codes = codes | fields(blocks[..., 16:48], 1) << 4
    supers = torch.cat([half_at(blocks, 0), -half_at(blocks, 2)], -1)
    return Parts(line(codes), six_bit_pairs(blocks[..., 4:16]).flatten(1, 2), supers)


def take_6k(blocks: Array) -> Parts:
    low, high, scales, _ = blocks.split([128, 64, 16, 2], -1)
    codes = fields_of_runs(low, 64, 4) | fields_of_runs(high, 32, 2) << 4
    return Parts(line(codes), scales.contiguous().view(torch.int8).flatten(1)[..., None], half_at(blocks, 208))


def take_2k(blocks: Array) -> Parts:
    scales, codes, _ = blocks.split([16, 64, 4], -1)
    pairs = torch.stack([scales & 15, scales >> 4], -1).view(torch.int8).flatten(1, 2)
    supers = torch.cat([half_at(blocks, 80), -half_at(blocks, 82)], -1)
    return Parts(line(fields_of_runs(codes, 32, 2)), pairs, supers)


def take_3k(blocks: Array) -> Parts:
    third, codes, low, high, _ = blocks.split([32, 64, 8, 4, 2], -1)
    scales = (fields(low, 4) | fields(high, 2) << 4).view(torch.int8) - 32
    return Parts(line(fields_of_runs(codes, 32, 2) | fields(third, 1) << 2), one_each(scales), half_at(blocks, 108))


def take_4xs(blocks: Array) -> Parts:
    high, low, codes = blocks[..., 2:].split([2, 4, 128], -1)
    scales = (fields_of_runs(low, 1, 4) | fields_of_runs(high, 1, 2) << 4).view(torch.int8) - 32
    return Parts(line(fields_of_runs(codes, 16, 4)), one_each(scales), half_at(blocks, 0))


def take_mxfp4(blocks: Array) -> Parts:
    """Scales are powers of two, those of the lowest exponents subnormal; they halve the table."""
    exponents = blocks[..., :1].to(torch.int16)
    words = torch.where(exponents > 1, exponents - 1 << 7, 32 << exponents)
    return Parts(line(fields(blocks[..., 1:], 4)), words.to(torch.int16).view(torch.bfloat16))


def take_nvfp4(blocks: Array) -> Parts:
    """Scales have 4 bits of exponent and 3 of mantissa; they halve the table."""
    exponents, mantissas = blocks[..., :4] >> 3 & 15, (blocks[..., :4] & 7).float()
    scales = torch.where(exponents > 0, 8 + mantissas, 2 * mantissas) * torch.exp2(exponents.float() - 11)
    scales = torch.where(blocks[..., :4] == 0x7F, 0, scales)
    return Parts(line(fields_of_runs(blocks[..., 4:], 8, 4)), one_each(scales.bfloat16()))


def take_nf4(blocks: Array) -> Parts:
    """Scales are float32."""
    scales, codes = blocks.split([4, 16], -1)
    return Parts(line(fields(codes, 4)), scales.contiguous().view(torch.float32).half())


TAKE: dict[str, Callable[[Array], Parts]] = {
    "Q4_0": lambda blocks: take_4(blocks, 1),
    "Q4_1": lambda blocks: take_4(blocks, 2),
    "Q5_0": lambda blocks: take_5(blocks, 1),
    "Q5_1": lambda blocks: take_5(blocks, 2),
    "Q8_0": take_8,
    "Q4_K": lambda blocks: take_k(blocks, fifth=False),
    "Q5_K": lambda blocks: take_k(blocks, fifth=True),
    "Q6_K": take_6k,
    "Q2_K": take_2k,
    "Q3_K": take_3k,
    "IQ4_NL": lambda blocks: take_4(blocks, 1),
    "IQ4_XS": take_4xs,
    "MXFP4": take_mxfp4,
    "NVFP4": take_nvfp4,
    "NF4": take_nf4,
} | iquants.TAKE


# ---- packing ----


def pack_parts(parts: Callable[[int, int], Parts], coding: Coding, rows: int, width: int) -> QuantizedWeight:
    pieces = [arrange(parts(first, last), coding) for first, last in runs(rows, width)]
    low, high, scales, supers = (join([piece[i] for piece in pieces]) for i in range(4))
    return QuantizedWeight(coding, rows, width, low, high, scales, supers)


def runs(rows: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(AT_ONCE // width // ROWS, 1) * ROWS
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def join(pieces: list[Array]) -> Array:
    return None if pieces[0] is None else torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def arrange(parts: Parts, coding: Coding) -> tuple[Array, Array | None, Array, Array | None]:
    rows, width = parts.codes.shape
    tiles = -(-width // COLUMNS)
    height = -(-rows // ROWS)
    codes = pad(parts.codes, height * ROWS, tiles * COLUMNS)
    codes = codes.view(height, 2, 8, tiles, 4, 2, 4, 2)  # half, g, tile, c, side, t, e
    codes = codes.permute(0, 3, 2, 6, 4, 5, 1, 7)  # tile, g, t, c, side, half, e
    low, high = arrange_codes(codes, coding.bits) if not coding.table else (arrange_pairs(codes), None)
    scales = factors(parts.scales, height, tiles * coding.groups, coding.groups)
    supers = None if parts.supers is None else factors(parts.supers, height, parts.supers.shape[1], 1)
    return low, high, scales, supers


def arrange_codes(codes: Array, bits: int) -> tuple[Array, Array | None]:
    if bits == 8:
        words = together(codes, [0, 8, 16, 24])  # (half, e) -> [.., g, t, c, side]
        return words.unflatten(4, (2, 2)).permute(0, 1, 4, 2, 3, 5, 6).contiguous(), None
    pairs = codes.flatten(5, 6)  # [.., g, t, c, pair, e]
    low = together(pairs & 15, [4 * pair + 16 * e for pair in range(4) for e in range(2)])
    if bits == 4:
        return low, None
    width = bits - 4
    pairs = (codes >> 4).flatten(4, 6).unflatten(4, (width, 16 // width))  # [.., g, t, word, pair, e]
    return low, together(pairs, [width * pair + 16 * e for pair in range(16 // width) for e in range(2)])


def arrange_pairs(codes: Array) -> Array:
    """The codes of each e side by side: two that are looked up together give one word."""
    return together(codes.flatten(5, 6), [8 * pair + 4 * e for pair in range(4) for e in range(2)])


def together(codes: Array, places: list[int]) -> Array:
    """Words of the last two axes, each of whose codes begins at its place."""
    shifts = torch.tensor(places, dtype=torch.int32, device=codes.device).view(codes.shape[-2:])
    return (codes.int() << shifts).sum((-1, -2), dtype=torch.int32)


def factors(numbers: Array, height: int, columns: int, groups: int) -> Array:
    """Words of [rows, columns, 1 or 2] numbers as each g reads them: [row of tiles, tile, g, (group, half, number)]."""
    rows, present, each = numbers.shape
    padded = numbers.new_zeros(height * ROWS, columns, each)
    padded[:rows, :present] = numbers
    padded = padded.view(height, 2, 8, columns // groups, groups, each)  # half, g, tile, group
    return padded.permute(0, 3, 2, 4, 1, 5).contiguous().flatten(3).view(torch.int32)


def pad(values: Array, rows: int, columns: int) -> Array:
    if values.shape == (rows, columns):
        return values
    padded = values.new_zeros(rows, columns)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded
