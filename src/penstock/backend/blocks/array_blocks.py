"""Copies the KV blocks of backends whose cache is NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import HostRoom
from penstock.backend.blocks.host_room import PlainRoom
from penstock.backend.blocks.rows import Rows

Arrays = Callable[[], Sequence[NDArray[Any]]]


class ArrayBlocks:
    """Implements BlockMemory and BlockRows over arrays whose first axis is the block."""

    def __init__(self, kind: str, arrays: Arrays) -> None:
        self._kind = kind  # backend and contents
        self._arrays = arrays

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for array in self._arrays():
            for source, target in pairs:
                array[target] = array[source]

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        return b"".join(array[block].tobytes() for block in blocks for array in self._arrays())

    def import_blocks(self, blocks: Sequence[int], data: bytes | memoryview) -> None:
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

    def copy_out(self, blocks: Sequence[int], rows: Rows, places: Sequence[int], crcs: Sequence[int] = ()) -> list[int]:
        for block, place in zip(blocks, places, strict=True):
            rows[place] = np.frombuffer(self.export_blocks([block]), np.uint8)
        return [crc32(rows[place], crc) for place, crc in zip(places, crcs, strict=False)]

    def copy_in(self, blocks: Sequence[int], rows: Rows, places: Sequence[int], crcs: Sequence[int] = ()) -> list[int]:
        for block, place in zip(blocks, places, strict=True):
            self.import_blocks([block], rows[place].tobytes())
        return [crc32(self.export_blocks([block]), crc) for block, crc in zip(blocks, crcs, strict=False)]

    def host_room(self, places: int) -> HostRoom:
        return PlainRoom(self, places)

    def touch_blocks(self, blocks: Sequence[int]) -> None:
        for array in self._arrays():
            array[list(blocks)] = 0

    def fingerprint(self) -> str:
        shapes = " ".join("x".join(map(str, array.shape[1:])) for array in self._arrays())
        return f"{self._kind} 1, blocks of {shapes}"
