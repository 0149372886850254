"""From a checkpoint's tensors to native packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import Floats
from penstock.backend.cpu._native import Weight, fill_parts
from penstock.model.quant import dequantize
from penstock.model.tensor import Tensor

BATCH_BYTES = 1 << 28  # packed in one go: an interrupt has to wait for as much


class Packing:
    """Weights under way. They are filled many at a time, because threads share that evenly and other Python threads
    run meanwhile; until `finish`, some are still empty."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._waiting: list[tuple[Weight, int, NDArray[np.uint8]]] = []
        self._bytes = 0

    def matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Weight:
        weight = Weight(parts[0].shape[1], [(part.format.name, part.shape[0]) for part in parts])
        if any(bias):
            weight.set_bias(np.concatenate([bias_of(part, tensor) for part, tensor in zip(parts, bias, strict=True)]))
        self._waiting += [(weight, index, part.data) for index, part in enumerate(parts)]
        self._bytes += sum(part.data.nbytes for part in parts)
        if self._bytes >= BATCH_BYTES:
            self.finish()
        return weight

    def finish(self) -> None:
        fill_parts(self._waiting, self._threads)
        self._waiting, self._bytes = [], 0


def pack_vector(tensor: Tensor) -> Floats:
    return np.ascontiguousarray(dequantize(tensor), dtype=np.float32)


def bias_of(part: Tensor, bias: Tensor | None) -> Floats:
    return np.zeros(part.shape[0], np.float32) if bias is None else pack_vector(bias)
