"""Keeps copies of KV blocks in ordinary host memory, for backends that have nothing faster."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import BlockMemory, CopyTiming
from penstock.backend.blocks.rows import BlockRows

CHUNK = 2 << 20  # bytes that are copied at once: more leave a processor's cache on their way, and need new memory


class PlainRoom:
    """Implements HostRoom. It copies at once. The system backs the places with memory when they are first written."""

    def __init__(self, memory: BlockMemory, places: int) -> None:
        self._memory = memory
        self._rows = memory if isinstance(memory, BlockRows) else None
        self.array: NDArray[np.uint8] = np.empty((places, len(memory.export_blocks([0]))), np.uint8)
        self._few = max(CHUNK // self.array.shape[1], 1)  # blocks
        self._timed: list[CopyTiming] = []

    def copy_out(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        began = time.perf_counter()
        if self._rows is not None:
            self._rows.copy_out(blocks, self.array, places)
        else:
            self._export(blocks, places)
        self._timed.append(CopyTiming("out", len(blocks), time.perf_counter() - began))

    def copy_in(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        began = time.perf_counter()
        if self._rows is not None:
            self._rows.copy_in(blocks, self.array, places)
        else:
            self._import(blocks, places)
        self._timed.append(CopyTiming("in", len(blocks), time.perf_counter() - began))

    def finish(self) -> None:
        """Does nothing: no copy is under way."""

    def timings(self) -> list[CopyTiming]:
        timed, self._timed = self._timed, []
        return timed

    def close(self) -> None:
        self.array = np.empty((0, 0), np.uint8)

    def _export(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        for at in range(0, len(blocks), self._few):
            some = blocks[at : at + self._few]
            data = np.frombuffer(self._memory.export_blocks(some), np.uint8).reshape(len(some), -1)
            for place, block in zip(places[at : at + self._few], data, strict=True):
                self.array[place] = block

    def _import(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        first, end = places[0], places[-1] + 1
        if list(places) == list(range(first, end)):
            self._memory.import_blocks(blocks, self.array[first:end].data.cast("B"))
            return
        for at in range(0, len(blocks), self._few):
            data = b"".join(memoryview(self.array[place]) for place in places[at : at + self._few])
            self._memory.import_blocks(blocks[at : at + self._few], data)
