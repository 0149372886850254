"""Packs quantized matrices for the GPU: codes and scales lie in the order in which tensor cores read them.

A matrix is divided into tiles of 16 rows and 64 columns, in four steps c of 16 columns. In each step, lane 4 * g + t of
a warp owns rows g and g + 8 (`half` 0, 1) at columns 2 * t + e and 2 * t + 8 + e (`side` 0, 1; e 0, 1).
    low     4 words for each lane: word c has 4 bits of each code of step c, for (side, half, e) from bit
            8 * side + 4 * half + 16 * e on, or 16 * side + 8 * half + 4 * e if a table has their values.
            Codes of 8 bits have 8 words (c, side) of bytes (half, e), in two runs of 4.
    high    a word for each lane with the fifth bits, or two words with the fifth and sixth bits, in the same order
    scales  for each g: (group of columns, half, scale or minimum), 16 bits each, or bytes: floats, or numbers that
            `supers` multiply
    supers  for each g: (half, scale or minimum), float16 for every 256 columns
Nothing is rounded: kernels read exactly the stored values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backend.cuda import iquants
from penstock.backend.cuda.quant_blocks import (
    Array,
    Coding,
    QuantBlocks,
    fields,
    fields_of_runs,
    half_at,
    line,
    one_each,
)
from penstock.backend.cuda.storage import COLUMNS, ROWS
from penstock.backend.cuda.transfer import Transfer
from penstock.model.dequantize import FP4_VALUES, IQ4_VALUES, NF4_VALUES
from penstock.model.tensor import AFFINE, STORAGE, AffineFormat

CHUNK_VALUES = 1 << 24  # packed together: each takes some 20 bytes meanwhile

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
    "MXFP4": Coding(4, 32, False, 0, e8m0=True, table=FP4_TABLE, factor=1 / 2),  # the table is doubled
    "NVFP4": Coding(4, 16, False, 0, e4m3=True, table=FP4_TABLE, factor=256 / 2),
    "NF4": Coding(4, 32, False, 0, table=NF4_TABLE),
    "INT4": Coding(4, 64, True, 0),
    **{name: Coding(one.bits, one.values, True, 0, scaled_minima=one.zeros) for name, one in AFFINE.items()},
} | iquants.CODINGS


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Holds a packed matrix."""

    coding: Coding
    rows: int
    width: int
    low: Array  # all int32: [rows of tiles, tiles, ...]
    high: Array | None
    scales: Array
    supers: Array | None
    factor: float = 1.0  # multiplies all values, in addition to the coding's

    @property
    def tiles(self) -> int:
        return -(-self.width // COLUMNS)

    @property
    def bytes(self) -> int:
        return sum(4 * words.numel() for words in (self.low, self.high, self.scales, self.supers) if words is not None)


def pack(
    data: NDArray[np.uint8], format_name: str, rows: int, width: int, transfer: Transfer, factor: float = 1.0
) -> QuantizedWeight:
    """Moves a checkpoint's bytes to the device and packs them there, some rows at a time."""
    format = STORAGE[format_name]
    lines = data.reshape(rows, width // format.values * format.bytes)

    def split(first: int, last: int) -> QuantBlocks:
        blocks = transfer.fetch(lines[first:last].reshape(-1))
        return SPLIT[format_name](blocks.view(last - first, -1, format.bytes))

    return replace(pack_blocks(split, CODINGS[format_name], rows, width), factor=factor)


def quantize_int4(values: Array) -> QuantizedWeight:
    """Quantizes values [rows, width] on the device to 4 bits, in groups of 64 from their lowest to their highest."""
    rows, width = values.shape
    return pack_blocks(lambda first, last: int4_blocks(values[first:last]), CODINGS["INT4"], rows, width)


def int4_blocks(values: Array) -> QuantBlocks:
    rows, width = values.shape
    groups = -(-width // CODINGS["INT4"].group)
    padded = pad(values.float(), rows, groups * CODINGS["INT4"].group).view(rows, groups, -1)
    lowest = padded.amin(-1, keepdim=True).half()
    scale = ((padded.amax(-1, keepdim=True) - lowest) * (1 / 15)).half()  # a GPU would divide inexactly
    codes = ((padded - lowest) / scale.float().clamp(min=1e-8)).round().clamp(0, 15)
    return QuantBlocks(codes.to(torch.uint8).view(rows, -1)[:, :width], torch.cat([scale, lowest], -1))


# ---- formats ----


def split_q4(blocks: Array, scales: int) -> QuantBlocks:
    """Splits Q4_0 and Q4_1: float16 numbers come before the nibbles."""
    numbers = [half_at(blocks, 2 * i) for i in range(scales)]
    return QuantBlocks(line(fields(blocks[..., 2 * scales :], 4)), torch.cat(numbers, -1))


def split_q5(blocks: Array, scales: int) -> QuantBlocks:
    """Splits Q5_0 and Q5_1: the fifth bits come before the nibbles."""
    numbers = [half_at(blocks, 2 * i) for i in range(scales)]
    fifth, nibbles = blocks[..., 2 * scales :].split([4, 16], -1)
    return QuantBlocks(line(fields(nibbles, 4) | fields_of_runs(fifth, 1, 1) << 4), torch.cat(numbers, -1))


def split_q8(blocks: Array) -> QuantBlocks:
    return QuantBlocks(line(blocks[..., 2:] ^ 128), half_at(blocks, 0))


def six_bit_pairs(packed: Array) -> Array:
    """Unpacks 8 scales and 8 minima from 12 bytes: [..., 12] -> [..., 8, 2] of int8."""
    first, second, nibbles = packed.split(4, -1)
    scales = torch.cat([first & 63, nibbles & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, nibbles >> 4 | second >> 6 << 4], -1)
    return torch.stack([scales, minima], -1).view(torch.int8)


def split_q4_k_or_q5_k(blocks: Array, fifth: bool) -> QuantBlocks:
    """Splits Q4_K and Q5_K. They subtract what they call a minimum, so its factor changes sign."""
    codes = fields_of_runs(blocks[..., 48:] if fifth else blocks[..., 16:], 32, 4)
    if fifth:
        codes = codes | fields(blocks[..., 16:48], 1) << 4
    supers = torch.cat([half_at(blocks, 0), -half_at(blocks, 2)], -1)
    return QuantBlocks(line(codes), six_bit_pairs(blocks[..., 4:16]).flatten(1, 2), supers)


def split_q6_k(blocks: Array) -> QuantBlocks:
    low, high, scales, _ = blocks.split([128, 64, 16, 2], -1)
    codes = fields_of_runs(low, 64, 4) | fields_of_runs(high, 32, 2) << 4
    return QuantBlocks(line(codes), scales.contiguous().view(torch.int8).flatten(1)[..., None], half_at(blocks, 208))


def split_q2_k(blocks: Array) -> QuantBlocks:
    scales, codes, _ = blocks.split([16, 64, 4], -1)
    pairs = torch.stack([scales & 15, scales >> 4], -1).view(torch.int8).flatten(1, 2)
    supers = torch.cat([half_at(blocks, 80), -half_at(blocks, 82)], -1)
    return QuantBlocks(line(fields_of_runs(codes, 32, 2)), pairs, supers)


def split_q3_k(blocks: Array) -> QuantBlocks:
    third, codes, low, high, _ = blocks.split([32, 64, 8, 4, 2], -1)
    scales = (fields(low, 4) | fields(high, 2) << 4).view(torch.int8) - 32
    return QuantBlocks(
        line(fields_of_runs(codes, 32, 2) | fields(third, 1) << 2), one_each(scales), half_at(blocks, 108)
    )


def split_iq4_xs(blocks: Array) -> QuantBlocks:
    high, low, codes = blocks[..., 2:].split([2, 4, 128], -1)
    scales = (fields_of_runs(low, 1, 4) | fields_of_runs(high, 1, 2) << 4).view(torch.int8) - 32
    return QuantBlocks(line(fields_of_runs(codes, 16, 4)), one_each(scales), half_at(blocks, 0))


def split_mxfp4(blocks: Array) -> QuantBlocks:
    """Splits MXFP4, whose scales are powers of two."""
    return QuantBlocks(line(fields(blocks[..., 1:], 4)), blocks[..., :1])


def split_nvfp4(blocks: Array) -> QuantBlocks:
    """Splits NVFP4, whose scales are unsigned; the code of NaN in e4m3 means 0."""
    scales = torch.where(blocks[..., :4] == 0x7F, 0, blocks[..., :4] & 0x7F)
    return QuantBlocks(line(fields_of_runs(blocks[..., 4:], 8, 4)), one_each(scales))


def split_nf4(blocks: Array) -> QuantBlocks:
    """Splits NF4, whose scales are float32; they are rounded to float16."""
    scales, codes = blocks.split([4, 16], -1)
    return QuantBlocks(line(fields(codes, 4)), scales.contiguous().view(torch.float32).half())


def split_affine(affine: AffineFormat, blocks: Array) -> QuantBlocks:
    """Splits codes from 0 on that have a minimum, or a zero point, which then changes its sign."""
    scale, minimum, codes = half_at(blocks, 0), half_at(blocks, 2), blocks[..., 4:]
    if affine.bits < 8:
        low, high = codes.split([affine.values // 2, affine.values * (affine.bits - 4) // 8], -1)
        codes = fields(low, 4)
        if affine.bits > 4:
            codes = codes | fields(high, affine.bits - 4) << 4
    return QuantBlocks(line(codes), torch.cat([scale, -minimum if affine.zeros else minimum], -1))


SPLIT: dict[str, Callable[[Array], QuantBlocks]] = {
    "Q4_0": lambda blocks: split_q4(blocks, 1),
    "Q4_1": lambda blocks: split_q4(blocks, 2),
    "Q5_0": lambda blocks: split_q5(blocks, 1),
    "Q5_1": lambda blocks: split_q5(blocks, 2),
    "Q8_0": split_q8,
    "Q4_K": lambda blocks: split_q4_k_or_q5_k(blocks, fifth=False),
    "Q5_K": lambda blocks: split_q4_k_or_q5_k(blocks, fifth=True),
    "Q6_K": split_q6_k,
    "Q2_K": split_q2_k,
    "Q3_K": split_q3_k,
    "IQ4_NL": lambda blocks: split_q4(blocks, 1),
    "IQ4_XS": split_iq4_xs,
    "MXFP4": split_mxfp4,
    "NVFP4": split_nvfp4,
    "NF4": split_nf4,
} | iquants.SPLIT


SPLIT |= {name: partial(split_affine, one) for name, one in AFFINE.items()}


# ---- packing ----


def pack_blocks(split: Callable[[int, int], QuantBlocks], coding: Coding, rows: int, width: int) -> QuantizedWeight:
    pieces = [arrange(split(first, last), coding) for first, last in runs(rows, width)]
    low, high, scales, supers = (join([piece[i] for piece in pieces]) for i in range(4))
    return QuantizedWeight(coding, rows, width, low, high, scales, supers)


def runs(rows: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(CHUNK_VALUES // width // ROWS, 1) * ROWS
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def join(pieces: list[Array]) -> Array:
    return None if pieces[0] is None else torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def arrange(blocks: QuantBlocks, coding: Coding) -> tuple[Array, Array | None, Array, Array | None]:
    rows, width = blocks.codes.shape
    tiles = -(-width // COLUMNS)
    height = -(-rows // ROWS)
    codes = pad(blocks.codes, height * ROWS, tiles * COLUMNS)
    codes = codes.view(height, 2, 8, tiles, 4, 2, 4, 2)  # half, g, tile, c, side, t, e
    codes = codes.permute(0, 3, 2, 6, 4, 5, 1, 7)  # tile, g, t, c, side, half, e
    low, high = arrange_codes(codes, coding.bits) if not coding.table else (arrange_pairs(codes), None)
    scales = factors(blocks.scales, height, tiles * coding.groups, coding.groups)
    supers = None if blocks.supers is None else factors(blocks.supers, height, blocks.supers.shape[1], 1)
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
    """Returns words of codes that index a table. Codes of one e are neighbours: two, looked up together, give one word
    of values."""
    return together(codes.flatten(5, 6), [8 * pair + 4 * e for pair in range(4) for e in range(2)])


def together(codes: Array, places: list[int]) -> Array:
    """Combines the codes of the last two axes into words; each begins at its bit in `places`."""
    shifts = torch.tensor(places, dtype=torch.int32, device=codes.device).view(codes.shape[-2:])
    return (codes.int() << shifts).sum((-1, -2), dtype=torch.int32)


def factors(numbers: Array, height: int, columns: int, groups: int) -> Array:
    """Returns words of numbers [rows, columns, 1 or 2] as each g reads them: [row of tiles, tile, g, (group, half,
    number)]."""
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
