"""Codes of a few bits with a scale for each group of columns: what most formats are, whatever order they store it in.

    value = scale * (code - zero), or scale * code + minimum

They become storage blocks of 32 values that kernels know, if nothing is lost by that: numbers fit the codes, groups are
runs of whole blocks, and scales are float16 numbers. Else their values are computed as they are read, and a backend
keeps those.
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
from penstock.model.tensor import FORMATS, Bytes, Format, Tensor

BLOCK = 32
AT_ONCE = 1 << 20  # values that a thread recodes together: they stay in a cache
MOST_THREADS = 16
NUMBERS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}  # hold numbers from minus this to this less one
SHIFTED = {4: "Q4_1", 5: "Q5_1"}  # hold codes of so many bits with a minimum

PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
ALL = slice(None)

Floats = NDArray[np.float32]
Array = Any


class Factors(NamedTuple):
    scales: Floats  # [rows, groups]
    zeros: Array  # [rows, groups] whole numbers, or one for all
    minima: Floats | None = None  # [rows, groups]


@dataclass(frozen=True, slots=True)
class Grouped:
    name: str  # of the tensor
    kind: str  # of the format, in messages
    shape: tuple[int, ...]
    bits: int
    group: int  # columns that share a scale
    codes: Callable[[int, int], NDArray[np.uint8]]  # of some rows: [rows, width]
    factors: Callable[[int, int], Factors]
    places: Array | None = None  # [width] each column's group, where groups are not runs of columns

    def tensor(self) -> Tensor:
        kept = self.kept_as(self.factors(0, self.shape[0]))
        if kept is None:
            return Tensor(self.name, Format(self.kind, 1, 4), self.shape, self.values)
        return Tensor(self.name, FORMATS[kept], self.shape, partial(self.blocks, kept))

    def kept_as(self, factors: Factors) -> str | None:
        """The first format that holds it all."""
        width = self.shape[1]
        scales, zeros, minima = factors
        runs = self.places is None and width % BLOCK == 0 and self.group % BLOCK == 0
        if not runs or not is_half(scales) or not (minima is None or is_half(minima)):
            return None
        if minima is not None:
            return next((name for bits, name in SHIFTED.items() if self.bits <= bits), None)
        lowest, highest = -int(np.max(zeros)), (1 << self.bits) - 1 - int(np.min(zeros))
        return next((name for name, limit in NUMBERS.items() if -limit <= lowest and highest < limit), None)

    def values(self, first: int, last: int) -> Bytes:
        """Of these rows, as float32."""
        scales, zeros, minima = self.factors(first, last)
        place = np.arange(self.shape[1]) // self.group if self.places is None else self.places
        values = self.codes(first, last).astype(np.float32)
        if minima is None:
            values -= spread(zeros, place)
        values *= scales[:, place]
        if minima is not None:
            values += minima[:, place]
        return values.reshape(-1).view(np.uint8)

    def blocks(self, format: str, first: int, last: int) -> Bytes:
        width = self.shape[1]
        out = np.empty((last - first, width // BLOCK), LAYOUTS[format])
        step = max(AT_ONCE // width // BLOCK, 1) * BLOCK

        def fill(start: int) -> None:
            end = min(start + step, last)
            self.fill(format, start, end, out[start - first : end - first])

        with ThreadPoolExecutor(min(available_threads(), MOST_THREADS)) as threads:
            list(threads.map(fill, range(first, last, step)))
        return out.reshape(-1).view(np.uint8)

    def fill(self, format: str, first: int, last: int, out: Array) -> None:
        """Blocks of these rows: [rows, blocks]."""
        scales, zeros, minima = self.factors(first, last)
        place = np.arange(out.shape[1]) * BLOCK // self.group
        codes: Array = self.codes(first, last).reshape(*out.shape, BLOCK)
        out["d"] = scales[:, place]
        if minima is None:
            codes = codes + (NUMBERS[format] - spread(zeros, place)[..., None]).astype(np.uint8)
        else:
            out["m"] = minima[:, place]
        put_codes(codes, format, out)


def put_codes(codes: Array, format: str, out: Array) -> None:
    """Codes [..., 32] as the storage blocks have them."""
    if format == "Q8_0":
        out["qs"] = (codes ^ 128).view(np.int8)
        return
    if "qh" in out.dtype.names:
        out["qh"] = np.packbits(codes >> 4, axis=-1, bitorder="little")
        codes = codes & 15
    out["qs"] = codes[..., :16] | codes[..., 16:] << 4


def spread(zeros: Array, place: Array) -> Array:
    zeros = np.asarray(zeros)
    return zeros[:, place] if zeros.ndim else zeros[None, None]


def is_half(values: Floats) -> bool:
    """Whether all are float16 numbers."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def floats(tensor: Tensor, rows: slice = ALL, columns: slice = ALL) -> Floats:
    """Values of a plain part, a matrix or one that stands for each row: only these rows and columns are read."""
    if tensor.format.name not in PLAIN:
        raise MalformedFile(f"tensor {tensor.name!r} is stored as {tensor.format.name}; it must be {', '.join(PLAIN)}")
    stored = tensor.data.view(PLAIN[tensor.format.name]).reshape((len(tensor.shape) and tensor.shape[0]) or 1, -1)
    some = stored[rows, columns]
    if tensor.format.name == "BF16":
        return (some.astype(np.uint32) << 16).view(np.float32)
    return some.astype(np.float32)
