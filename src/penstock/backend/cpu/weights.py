"""Packs a checkpoint's tensors as native weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import Floats, StoredAs
from penstock.backend.cpu._native import Weight, fill_parts, packed_bits
from penstock.backend.cpu.packed_file import LEAST_BYTES, PackedFile
from penstock.model.dequantize import dequantize
from penstock.model.formats.near_blocks import as_near_blocks
from penstock.model.formats.trellis import TILE, Trellis, trellis_of
from penstock.model.ops import ExpertWeights
from penstock.model.tensor import FORMATS, FP8, STORAGE, Bytes, Format, Stack, Tensor, factor_of, some_rows

BATCH_BYTES = 1 << 28  # packed in one native call: an interrupt has to wait for it
MADE_BYTES = 1 << 23  # the same for bytes in memory, which stay there until they are packed
CHUNK_VALUES = 1 << 22  # widened together
BLOCK = 32  # values of a row that kernels of all formats but F32 and F16 take together
NOTED_GROWTH = 1.1  # ratio to the bytes in the file above which growth is logged


class HeadWeights(NamedTuple):
    """Holds a matrix for each head, as a part of one weight."""

    weight: Weight
    heads: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns the number of heads, and the rows and columns of each one's matrix."""
        return self.heads, self.weight.rows // self.heads, self.weight.width


class Packing:
    """Collects weights to be packed. Many are filled at a time, because threads share that work evenly and other Python
    threads run meanwhile; some stay empty until `finish`. With a file of packed weights all stay empty until then, and
    if the file is the right one, the checkpoint's matrices are not read."""

    def __init__(self, threads: int, file: PackedFile | None = None) -> None:
        self._threads = threads
        self._file = file
        self._in_file: list[tuple[Weight, int, Tensor]] = []  # expected there
        self._waiting: list[tuple[Weight, int, NDArray[np.uint8]]] = []
        self._bytes = 0
        self._widened: set[str] = set()
        self._values: dict[Format, int] = {}  # packed so far

    def matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Weight:
        return self._matrix(parts, bias, all(map(trellis_of, parts)))

    def _matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None], in_trellis: bool) -> Weight:
        parts = [tiles_of(part) if in_trellis else self._readable(part) for part in parts]
        weight = Weight(parts[0].shape[1], [(part.format.name, part.shape[0]) for part in parts])
        if any(bias):
            weight.set_bias(np.concatenate([bias_of(part, tensor) for part, tensor in zip(parts, bias, strict=True)]))
        if self._file:
            self._file.add(weight, parts)
        for index, part in enumerate(parts):
            if isinstance(part.source, Tiles):
                weight.set_trellis(index, part.source.trellis.suh, part.source.trellis.svh)
            if part.scales is not None:
                weight.set_factor(index, factor_of(part) or 0)
            self._values[part.format] = self._values.get(part.format, 0) + prod(part.shape)
            if self._file and self._file.exists:
                self._in_file.append((weight, index, part))
            else:
                self._add(weight, index, part)
        return weight

    def experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> ExpertWeights:
        bias = np.zeros(0, np.float32) if choice_bias is None else pack_vector(choice_bias)
        return ExpertWeights(self._experts(up), self._experts(down), bias)

    def _experts(self, stacks: Sequence[Stack]) -> list[Weight]:
        in_trellis = all(trellis_of(part) for stack in stacks for part in stack.parts)
        return [self._matrix(*stack, in_trellis) for stack in stacks]

    def heads(self, tensor: Tensor) -> HeadWeights:
        count, rows, width = tensor.shape
        whole = replace(tensor, shape=(count * rows, width))
        if width % BLOCK and whole.format.name not in ("F32", "F16"):
            values = dequantize(whole).reshape(-1).view(np.uint8)
            whole = replace(whole, format=FORMATS["F32"], source=values, scales=None)
        parts = [some_rows(whole, head * rows, (head + 1) * rows) for head in range(count)]
        return HeadWeights(self.matrix(parts, [None] * count), count)

    def _add(self, weight: Weight, index: int, part: Tensor) -> None:
        self._waiting.append((weight, index, part.data))
        self._bytes += part.size * (BATCH_BYTES // MADE_BYTES if callable(part.source) else 1)
        if self._bytes >= BATCH_BYTES:
            self._fill()

    def _readable(self, part: Tensor) -> Tensor:
        """Returns the part in a format that kernels read: its own, Q8_0, or BF16."""
        if part.format.name in STORAGE and factor_of(part) is not None:
            return part
        if blocks := as_near_blocks(part):
            return blocks
        kind = "FP8" if part.format.name in FP8 else part.format.name
        if kind not in self._widened:
            import logging  # takes longer than packing most models

            logging.getLogger(__name__).warning(
                "%s weights become BF16 on a CPU, which takes 2 bytes for each value: no kernel reads them as they are",
                kind,
            )
            self._widened.add(kind)
        return widened(part)

    def log_growth(self) -> None:
        grown = {format: packed_bits(format.name) / 8 for format in self._values}
        grown = {format: size for format, size in grown.items() if size > NOTED_GROWTH * format.bytes / format.values}
        if grown:
            import logging

            stored = sum(self._values[format] // format.values * format.bytes for format in grown)
            packed = sum(self._values[format] * size for format, size in grown.items())
            names = " and ".join(sorted(format.name for format in grown))
            logging.getLogger(__name__).warning(
                f"weights in {names} take {packed / 1e6:.0f} MB in memory, {stored / 1e6:.0f} MB in the file"
            )

    def finish(self) -> PackedFile | None:
        """Fills all weights that are still empty. Returns the file that they should be written to, if any."""
        file, self._file = self._file, None
        if file and file.exists and file.read(self._threads):
            self._in_file = []
            return None
        for each in self._in_file:
            self._add(*each)
        self._in_file = []
        self._fill()
        return file if file and file.nbytes >= LEAST_BYTES else None

    def _fill(self) -> None:
        fill_parts(self._waiting, self._threads)
        self._waiting, self._bytes = [], 0


@dataclass(frozen=True, slots=True)
class Tiles:
    """Returns the tiles of an EXL3 weight in the order of its rows: 16 rows are one after the other in the input."""

    trellis: Trellis

    def __call__(self, first: int, last: int) -> Bytes:
        some = self.trellis.tiles[:, first // TILE : last // TILE]
        return np.ascontiguousarray(some.swapaxes(0, 1)).reshape(-1).view(np.uint8)


def tiles_of(part: Tensor) -> Tensor:
    """Returns an EXL3 weight as its tiles, in the format of their reader."""
    trellis = trellis_of(part)
    assert trellis is not None
    format = Format(f"{trellis.name}-{trellis.code_book}", TILE, 2 * trellis.bits)
    return replace(part, format=format, source=Tiles(trellis))


def stored_as(tensor: Tensor) -> StoredAs:
    if len(tensor.shape) == 1:
        return StoredAs("F32", 32)
    if trellis := trellis_of(tensor):
        return StoredAs(trellis.name, trellis.bits_with_vectors)
    name = (as_near_blocks(tensor) or tensor).format.name
    stored = name if name in STORAGE else "BF16"
    return StoredAs(stored, packed_bits(stored))


def widened(part: Tensor) -> Tensor:
    return replace(part, format=FORMATS["BF16"], source=partial(widened_rows, part), scales=None)


def widened_rows(part: Tensor, first: int, last: int) -> Bytes:
    width = part.shape[1]
    out = np.empty((last - first, width), np.uint16)
    step = max(CHUNK_VALUES // width, 1)
    for start in range(first, last, step):
        end = min(start + step, last)
        out[start - first : end - first] = bf16_of(dequantize(some_rows(part, start, end)))
    return out.reshape(-1).view(np.uint8)


def bf16_of(values: Floats) -> NDArray[np.uint16]:
    """Rounds to the nearest BF16, and to the even one of two that are equally near."""
    words = values.view(np.uint32)
    nearest = (words + 0x7FFF + (words >> 16 & 1) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def pack_vector(tensor: Tensor) -> Floats:
    return np.ascontiguousarray(dequantize(tensor), dtype=np.float32)


def bias_of(part: Tensor, bias: Tensor | None) -> Floats:
    """Returns the bias of a part: zeros if it has none."""
    return np.zeros(part.shape[0], np.float32) if bias is None else pack_vector(bias)
