"""Copies the KV blocks of backends whose cache is NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Callable[[], Sequence[NDArray[Any]]]


class ArrayBlocks:
    """Implements BlockMemory over arrays whose first axis is the block."""

    def __init__(self, kind: str, arrays: Arrays) -> None:
        self._kind = kind  # the backend, and what it stores
        self._arrays = arrays

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for array in self._arrays():
            for source, target in pairs:
                array[target] = array[source]

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        return b"".join(array[block].tobytes() for block in blocks for array in self._arrays())

    def import_blocks(self, blocks: Sequence[int], data: bytes) -> None:
        arrays = self._arrays()
        size = sum(array[0].nbytes for array in arrays)
        if len(data) != size * len(blocks):
            raise ValueError(f"{len(blocks)} KV blocks take {size * len(blocks)} bytes; got {len(data)}")
        at = 0
        for block in blocks:
            for array in arrays:
                values = np.frombuffer(data, array.dtype, array[block].size, at)
                array[block] = values.reshape(array[block].shape)
                at += values.nbytes

    def fingerprint(self) -> str:
        shapes = " ".join("x".join(map(str, array.shape[1:])) for array in self._arrays())
        return f"{self._kind} 1, blocks of {shapes}"
