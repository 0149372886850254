"""Defines a tensor of a checkpoint: raw bytes, a format, a shape and a role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.roles import Role


class Format(NamedTuple):
    """Describes a format: `bytes` bytes hold `values` consecutive values of a row."""

    name: str
    values: int
    bytes: int


# name: (values, bytes) of one storage block
FORMATS = {
    name: Format(name, values, size)
    for name, values, size in (
        ("F32", 1, 4),
        ("F16", 1, 2),
        ("BF16", 1, 2),
        ("Q4_0", 32, 18),
        ("Q4_1", 32, 20),
        ("Q5_0", 32, 22),
        ("Q5_1", 32, 24),
        ("Q8_0", 32, 34),
        ("Q2_K", 256, 84),
        ("Q3_K", 256, 110),
        ("Q4_K", 256, 144),
        ("Q5_K", 256, 176),
        ("Q6_K", 256, 210),
        ("IQ4_NL", 32, 18),
        ("IQ4_XS", 256, 136),
        ("MXFP4", 32, 17),
        ("NVFP4", 64, 36),
        ("IQ1_S", 256, 50),
        ("IQ1_M", 256, 56),
        ("IQ2_XXS", 256, 66),
        ("IQ2_XS", 256, 74),
        ("IQ2_S", 256, 82),
        ("IQ3_XXS", 256, 98),
        ("IQ3_S", 256, 110),
        ("TQ1_0", 256, 54),
        ("TQ2_0", 256, 66),
    )
}


class AffineFormat(NamedTuple):
    """Describes a format of unsigned codes, with a float16 scale and a float16 minimum or zero point per block: value =
    scale * code + minimum, or scale * (code - zero).
    """

    bits: int
    values: int  # values per block
    zeros: bool

    @property
    def name(self) -> str:
        return f"U{self.bits}_{'ZERO' if self.zeros else 'MIN'}_{self.values}"


# Formats that only formats/grouped.py makes. With a minimum and 32 values, they are Q4_1 and Q5_1.
AFFINE = {
    affine.name: affine
    for affine in (
        *(AffineFormat(bits, 64, False) for bits in (4, 6, 8)),
        *(AffineFormat(bits, 32, False) for bits in (6, 8)),
        *(AffineFormat(bits, values, True) for bits in (4, 8) for values in (64, 32)),
    )
}

# Formats read as the equivalent Q4_0: gguf/few_levels.py
FEW_LEVELS = {name: Format(name, values, 18) for name, values in (("Q1_0", 128), ("Q2_0", 64))}

# Formats that GGUF files only use for short vectors, read as F32
VECTORS_ONLY = {
    name: Format(name, 1, size) for name, size in (("F64", 8), ("I8", 1), ("I16", 2), ("I32", 4), ("I64", 8))
}

PLAIN = ("F32", "F16", "BF16")

# Formats that only safetensors files use, with separate scales
FP8 = {name: Format(name, 1, 1) for name in ("F8_E4M3", "F8_E5M2")}

# Formats of the parts that formats/ combines
INTEGERS = {
    name: Format(name, 1, size)
    for name, size in (
        *(("U8", 1), ("I8", 1), ("BOOL", 1), ("F8_E8M0", 1), ("I16", 2), ("I32", 4), ("U32", 4), ("I64", 8)),
    )
}

NF4 = Format("NF4", 32, 20)  # bitsandbytes' table of 16 numbers, with a float32 scale

# All formats that backends may keep in memory
STORAGE = (
    FORMATS
    | {NF4.name: NF4}
    | {name: Format(name, one.values, 4 + one.values * one.bits // 8) for name, one in AFFINE.items()}
)

Bytes = NDArray[np.uint8]


class Scales(NamedTuple):
    """Holds scales shared by blocks: the value at (r, c) is multiplied by values[r // rows, c // columns]."""

    values: NDArray[np.float32]  # [blocks down, blocks across]
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """Views a checkpoint's bytes, or computes them on demand."""

    name: str  # in the file
    format: Format
    shape: tuple[int, ...]  # rows first: a matrix is (out, in)
    source: Bytes | Callable[[int, int], Bytes]  # flat, usually a view of the mapped file; or computes rows a to b
    scales: Scales | None = None
    role: Role | None = None  # None until model/names.py identifies the tensor

    @property
    def data(self) -> Bytes:
        return self.source(0, prod(self.shape[:-1])) if callable(self.source) else self.source

    @property
    def size(self) -> int:
        return prod(self.shape) // self.format.values * self.format.bytes

    def with_role(self, role: Role) -> Tensor:
        """Returns a copy with a role; faster than `replace`, for models with thousands of experts."""
        return Tensor(self.name, self.format, self.shape, self.source, self.scales, role)


def factor_of(tensor: Tensor) -> float | None:
    """Returns the factor shared by all values; None if there is not exactly one."""
    if tensor.scales is None:
        return 1.0
    first = tensor.scales.values.flat[0]
    return float(first) if (tensor.scales.values == first).all() else None


class Stack(NamedTuple):
    """Lists tensors that are packed as one matrix, stacked by rows."""

    parts: Sequence[Tensor]
    bias: Sequence[Tensor | None]  # one per part


def some_rows(tensor: Tensor, first: int, last: int) -> Tensor:
    _, *width = tensor.shape
    row_bytes = prod(width) // tensor.format.values * tensor.format.bytes
    source, scales = tensor.source, tensor.scales
    source = made_rows(source, first, last) if callable(source) else source[first * row_bytes : last * row_bytes]
    if scales is not None:
        scales = Scales(scales.values[np.arange(first, last) // scales.rows], 1, scales.columns)
    return replace(tensor, shape=(last - first, *width), source=source, scales=scales)


def made_rows(make: Callable[[int, int], Bytes], first: int, last: int) -> Callable[[int, int], Bytes]:
    """Returns a `source` that reads only some of the rows."""
    cut: Callable[[int, int], Bytes] | None = make.cut(first, last) if hasattr(make, "cut") else None
    return cut or (lambda start, end: make(first + start, first + end))


def flat(tensor: Tensor) -> Tensor:
    return replace(tensor, shape=(prod(tensor.shape[:-1]), tensor.shape[-1]))


def every_other_row(tensor: Tensor, start: int) -> Tensor:
    """Returns every other row of a matrix, or value of a vector, starting at `start` (0 or 1)."""
    rows, *width = tensor.shape
    if rows % 2:
        raise MalformedFile(
            f"tensor {tensor.name!r} of shape {tensor.shape} has an odd number of rows; they must come in pairs"
        )

    def make(first: int, last: int) -> Bytes:
        both = some_rows(tensor, 2 * first, 2 * last)
        return both.data.reshape(last - first, 2, -1)[:, start].reshape(-1)

    return replace(tensor, shape=(rows // 2, *width), source=make if width else make(0, rows // 2), scales=None)


def rows_of_groups(tensor: Tensor, groups: int, first: int, last: int) -> Tensor:
    """Returns rows `first` to `last` of each of several equal groups of a matrix or vector."""
    rows, *width = tensor.shape
    each, size = rows // groups, last - first

    def make(start: int, end: int) -> Bytes:
        begin, stop = start // size, -(-end // size)
        whole = some_rows(tensor, begin * each, stop * each).data.reshape(stop - begin, each, -1)
        taken = whole[:, first:last].reshape((stop - begin) * size, -1)
        return taken[start - begin * size : end - begin * size].reshape(-1)

    scales = tensor.scales
    if scales is not None:
        taken = np.arange(groups * each).reshape(groups, each)[:, first:last].reshape(-1)
        scales = Scales(scales.values[taken // scales.rows], 1, scales.columns)
    source = make if width else make(0, groups * size)
    return replace(tensor, shape=(groups * size, *width), source=source, scales=scales)


def transposed(tensor: Tensor) -> Tensor:
    if tensor.format.name not in PLAIN or len(tensor.shape) != 2:
        raise UnsupportedModel(
            f"tensor {tensor.name!r} of shape {tensor.shape} in {tensor.format.name} is stored transposed; only "
            f"matrices in {', '.join(PLAIN)} can be transposed back"
        )
    values = tensor.data.view(f"u{tensor.format.bytes}").reshape(tensor.shape)

    def rows(first: int, last: int) -> Bytes:
        return np.ascontiguousarray(values[:, first:last].T).reshape(-1).view(np.uint8)

    return replace(tensor, shape=tensor.shape[::-1], source=rows, scales=None)
