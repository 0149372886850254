"""From a checkpoint's tensors to native packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import Floats
from penstock.backend.cpu._native import Weight, fill_parts, packed_bits
from penstock.model.quant import dequantize
from penstock.model.tensor import FLOAT8, FORMATS, Format, Stack, Tensor, some_rows

BATCH_BYTES = 1 << 28  # packed in one go: an interrupt has to wait for as much
AT_ONCE = 1 << 24  # values widened together
GROWN = 1.1  # times as many bytes as in the file are worth a word


class Bank(NamedTuple):
    """Of all experts of a layer."""

    up: list[Weight]
    down: list[Weight]
    choice_bias: Floats  # empty where there is none


class Packing:
    """Weights under way. They are filled many at a time, because threads share that evenly and other Python threads
    run meanwhile; until `finish`, some are still empty."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._waiting: list[tuple[Weight, int, NDArray[np.uint8]]] = []
        self._bytes = 0
        self._widened = False
        self._values: dict[Format, int] = {}  # packed so far

    def matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Weight:
        parts = [self._readable(part) for part in parts]
        weight = Weight(parts[0].shape[1], [(part.format.name, part.shape[0]) for part in parts])
        if any(bias):
            weight.set_bias(np.concatenate([bias_of(part, tensor) for part, tensor in zip(parts, bias, strict=True)]))
        self._waiting += [(weight, index, part.data) for index, part in enumerate(parts)]
        self._bytes += sum(part.data.nbytes for part in parts)
        for part in parts:
            self._values[part.format] = self._values.get(part.format, 0) + prod(part.shape)
        if self._bytes >= BATCH_BYTES:
            self.finish()
        return weight

    def experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> Bank:
        bias = np.zeros(0, np.float32) if choice_bias is None else pack_vector(choice_bias)
        return Bank([self.matrix(*stack) for stack in up], [self.matrix(*stack) for stack in down], bias)

    def _readable(self, part: Tensor) -> Tensor:
        """There are no kernels for values of 8 bits with exponents: they become BF16, which is far finer."""
        if part.format.name not in FLOAT8:
            return part
        if not self._widened:
            import logging  # takes longer than packing most models

            logging.getLogger(__name__).warning("FP8 weights become BF16 on a CPU, and take as much memory as those")
            self._widened = True
        return widened(part)

    def tell(self) -> None:
        """About formats that are packed into wider codes than they have."""
        grown = {format: packed_bits(format.name) / 8 for format in self._values}
        grown = {format: size for format, size in grown.items() if size > GROWN * format.bytes / format.values}
        if grown:
            import logging

            stored = sum(self._values[format] // format.values * format.bytes for format in grown)
            packed = sum(self._values[format] * size for format, size in grown.items())
            names = " and ".join(sorted(format.name for format in grown))
            logging.getLogger(__name__).warning(
                f"weights in {names} take {packed / 1e6:.0f} MB as codes of 2 to 4 bits, {stored / 1e6:.0f} in the file"
            )

    def finish(self) -> None:
        fill_parts(self._waiting, self._threads)
        self._waiting, self._bytes = [], 0


def widened(part: Tensor) -> Tensor:
    """A matrix as BF16, some rows at a time."""
    rows, width = part.shape
    out = np.empty((rows, width), np.uint16)
    step = max(AT_ONCE // width, 1)
    for first in range(0, rows, step):
        out[first : first + step] = bf16_of(dequantize(some_rows(part, first, min(first + step, rows))))
    return Tensor(part.name, FORMATS["BF16"], part.shape, out.reshape(-1).view(np.uint8))


def bf16_of(values: Floats) -> NDArray[np.uint16]:
    """The nearest, of two equally near ones the even."""
    words = values.view(np.uint32)
    nearest = (words + 0x7FFF + (words >> 16 & 1) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def pack_vector(tensor: Tensor) -> Floats:
    return np.ascontiguousarray(dequantize(tensor), dtype=np.float32)


def bias_of(part: Tensor, bias: Tensor | None) -> Floats:
    return np.zeros(part.shape[0], np.float32) if bias is None else pack_vector(bias)
