"""Converts small codes with a scale per group of columns, the common case, to storage blocks.

    value = scale * (code - zero), or scale * code + minimum

They become storage blocks of 32 or 64 values that kernels support if that is lossless: groups are runs of whole blocks,
and scales are exact in float16. Otherwise values are computed on reading, and backends store those.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.config import available_threads
from penstock.errors import MalformedFile
from penstock.model.dequantize import LAYOUTS
from penstock.model.formats.near_blocks import NearBlocks
from penstock.model.tensor import AFFINE, STORAGE, AffineFormat, Bytes, Format, Tensor

BLOCK, LONG_BLOCK = 32, 64
CHUNK_VALUES = 1 << 20  # per thread; fits into a CPU cache
MAX_THREADS = 16
LIMITS = {"Q4_0": 8, "Q8_0": 128}  # formats of integers from -limit to limit - 1
WITH_MINIMUM = {4: "Q4_1", 5: "Q5_1"}  # code bits: GGUF format with a minimum

MAX_STEP = 2**-7  # largest error from rounding a minimum, in scales

PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
ALL = slice(None)

Floats = NDArray[np.float32]
Array = Any


class Factors(NamedTuple):
    """Holds the scales and zero points or minima of some rows."""

    scales: Floats  # [rows, groups]
    zeros: Array  # [rows, groups] integers, or one for all
    minima: Floats | None = None  # [rows, groups]


@dataclass(frozen=True, slots=True)
class Grouped:
    """Describes a matrix of codes, whose rows are unpacked on reading."""

    name: str  # tensor name
    kind: str  # format name in messages
    shape: tuple[int, ...]
    bits: int
    group: int  # columns per scale
    codes: Callable[[int, int], NDArray[np.uint8]]  # unpacks rows a to b: [rows, width]
    factors: Callable[[int, int], Factors]
    places: Array | None = None  # [width] each column's group, if groups are not runs of columns

    def tensor(self) -> Tensor:
        stored = self.storage_format(self.factors(0, self.shape[0]))
        if stored is None:
            return Tensor(self.name, Format(self.kind, 1, 4), self.shape, self.near_rows())
        return Tensor(self.name, STORAGE[stored], self.shape, partial(self.blocks, stored))

    def near_rows(self) -> Callable[[int, int], Bytes]:
        """Returns a source of float32 rows, or of storage blocks if they only require rounding minima to float16, by
        less than 16-bit values would round.
        """
        scales, zeros, minima = self.factors(0, self.shape[0])
        if minima is None:
            return self.values
        stored = self.storage_format(Factors(scales, zeros, np.zeros_like(minima)))
        with np.errstate(over="ignore", invalid="ignore"):
            off = np.abs(minima.astype(np.float16) - minima)
        if stored is None or not (off <= MAX_STEP * np.abs(scales)).all():
            return self.values
        return NearBlocks(self.values, partial(self.blocks, stored), stored)

    def storage_format(self, factors: Factors) -> str | None:
        scales, zeros, minima = factors
        size = self.block_size
        if not size or not is_half(scales) or not (minima is None or is_half(minima)):
            return None
        if minima is not None:
            bits = next(bits for bits in (4, 5, 6, 8) if self.bits <= bits)
            own = AffineFormat(bits, size, zeros=False).name
            return own if own in AFFINE else WITH_MINIMUM[bits]
        lowest, highest = -int(np.max(zeros)), (1 << self.bits) - 1 - int(np.min(zeros))
        held = [name for name, limit in LIMITS.items() if -limit <= lowest and highest < limit]
        held.append(AffineFormat(4 if self.bits <= 4 else 8, size, zeros=True).name)
        return min(held, key=lambda name: STORAGE[name].bytes / STORAGE[name].values)

    @property
    def block_size(self) -> int:
        """Returns the largest block size within groups; 0: none fits."""
        if self.places is not None:
            return 0
        return next((size for size in (LONG_BLOCK, BLOCK) if self.shape[1] % size == self.group % size == 0), 0)

    def values(self, first: int, last: int) -> Bytes:
        scales, zeros, minima = self.factors(first, last)
        place = np.arange(self.shape[1]) // self.group if self.places is None else self.places
        values = self.codes(first, last).astype(np.float32)
        if minima is None:
            values -= zeros_at(zeros, place)
        values *= scales[:, place]
        if minima is not None:
            values += minima[:, place]
        return values.reshape(-1).view(np.uint8)

    def blocks(self, format: str, first: int, last: int) -> Bytes:
        """Returns rows `first` to `last` as storage blocks."""
        width = self.shape[1]
        out = np.empty((last - first, width // STORAGE[format].values), LAYOUTS[format])
        step = max(CHUNK_VALUES // width // BLOCK, 1) * BLOCK

        def fill(start: int) -> None:
            end = min(start + step, last)
            self.fill(format, start, end, out[start - first : end - first])

        with ThreadPoolExecutor(min(available_threads(), MAX_THREADS)) as threads:
            list(threads.map(fill, range(first, last, step)))
        return out.reshape(-1).view(np.uint8)

    def fill(self, format: str, first: int, last: int, out: Array) -> None:
        """Fills `out` [rows, blocks] with rows `first` to `last`."""
        scales, zeros, minima = self.factors(first, last)
        size = STORAGE[format].values
        place = np.arange(out.shape[1]) * size // self.group
        codes: Array = self.codes(first, last).reshape(*out.shape, size)
        out["d"] = scales[:, place]
        if minima is not None:
            out["m"] = minima[:, place]
        elif format in AFFINE:
            out["z"] = zeros_at(zeros, place)
        else:
            codes = codes + (LIMITS[format] - zeros_at(zeros, place)[..., None]).astype(np.uint8)
        put_codes(codes, format, out)


def put_codes(codes: Array, format: str, out: Array) -> None:
    if out.dtype["qs"].shape[0] == codes.shape[-1]:
        out["qs"] = (codes ^ 128).view(np.int8) if format == "Q8_0" else codes
        return
    if "qh" in out.dtype.names:
        high = codes >> 4
        if format == "Q5_1":
            out["qh"] = np.packbits(high, axis=-1, bitorder="little")
        else:
            out["qh"] = together(high, out.dtype["qh"].shape[0])
        codes = codes & 15
    out["qs"] = together(codes, out.dtype["qs"].shape[0])


def together(codes: Array, size: int) -> Array:
    """Packs codes [..., n] into `size` bytes: the first codes in the lowest bits of all bytes, then the next."""
    runs = codes.reshape(*codes.shape[:-1], -1, size)
    packed = runs[..., 0, :]
    for i in range(1, runs.shape[-2]):
        packed = packed | runs[..., i, :] << (8 // runs.shape[-2] * i)
    return packed


def zeros_at(zeros: Array, place: Array) -> Array:
    zeros = np.asarray(zeros)
    return zeros[:, place] if zeros.ndim else zeros[None, None]


def is_half(values: Floats) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def plain_values(tensor: Tensor, rows: slice = ALL, columns: slice = ALL) -> Floats:
    """Reads some rows and columns of an unquantized matrix or vector; a vector's entries count as rows."""
    if tensor.format.name not in PLAIN:
        raise MalformedFile(f"tensor {tensor.name!r} is stored as {tensor.format.name}; it must be {', '.join(PLAIN)}")
    stored = tensor.data.view(PLAIN[tensor.format.name]).reshape((len(tensor.shape) and tensor.shape[0]) or 1, -1)
    chosen = stored[rows, columns]
    if tensor.format.name == "BF16":
        return (chosen.astype(np.uint32) << 16).view(np.float32)
    return chosen.astype(np.float32)


Words = NDArray[Any]
Codes = NDArray[np.uint8]


def unpack(words: Words, bits: int) -> Codes:
    """Splits each row, a bit stream with the lowest bits first, into codes: [rows, n] -> [rows, codes]."""
    data = np.ascontiguousarray(words).view(np.uint8)
    rows = len(data)
    if bits == 8:
        return data
    if 8 % bits:
        stream = np.unpackbits(data, axis=1, bitorder="little")
        return np.packbits(stream.reshape(rows, -1, bits), axis=2, bitorder="little")[..., 0]
    codes = np.empty((*data.shape, 8 // bits), np.uint8)
    for i in range(8 // bits):
        np.bitwise_and(data >> (i * bits), (1 << bits) - 1, out=codes[..., i])
    return codes.reshape(rows, -1)


def unpack_range(words: Words, bits: int, first: int, last: int) -> Codes:
    """Unpacks only codes `first` to `last` of each row."""
    start, end = first // 32, -(-last // 32)
    return unpack(words[:, start * bits : end * bits], bits)[:, first - 32 * start : last - 32 * start]


def unpack_columns(words: Words, bits: int) -> Codes:
    """Unpacks each column of words into a row of codes: [n, columns] -> [columns, codes]."""
    return unpack(np.ascontiguousarray(words.T), bits)
