"""Keeps copies of KV blocks that are offered, in memory that other processes of this machine can map.

A place holds one block. Its generation is 0 while it is written and differs each time that it is written, so a reader
that finds the same generation before and after has read one whole block.

table    the generation of each place
places   one after the other, from the next page on
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from mmap import ACCESS_READ, ACCESS_WRITE, PAGESIZE, mmap
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GENERATION = np.dtype(np.uint64)
AT_ONCE = 48 << 20  # bytes that the system gives at the start: giving them later takes longer than to copy them


class StagedCopy(NamedTuple):
    """Says where a block is staged."""

    place: int
    generation: int
    crc: int | None = None  # None: computed for each reader of the block


NOT_STAGED = StagedCopy(-1, 0)


class StagedMap:
    """Is that memory as a process has it mapped. Without a file, no other process can map it."""

    def __init__(self, file: int, places: int, block_bytes: int, *, writable: bool = False) -> None:
        table = -(-places * GENERATION.itemsize // PAGESIZE) * PAGESIZE
        self.size = table + places * block_bytes
        if writable and file >= 0:
            os.ftruncate(file, self.size)
        access = ACCESS_WRITE if writable else ACCESS_READ
        memory = mmap(file, self.size, access=access) if file >= 0 else mmap(-1, self.size)
        self.generations = np.frombuffer(memory, GENERATION, places)
        self.blocks = np.frombuffer(memory, np.uint8, places * block_bytes, table).reshape(places, block_bytes)

    def block(self, place: int) -> memoryview:
        return memoryview(self.blocks[place])


class StagedBlocks:
    """Owns `places` places for blocks of `block_bytes` bytes. Any thread may use it."""

    def __init__(self, places: int, block_bytes: int) -> None:
        self.places, self.block_bytes = places, block_bytes
        self.file = os.memfd_create("penstock-offers") if hasattr(os, "memfd_create") else -1
        self._map = StagedMap(self.file, places, block_bytes, writable=True)
        self._free = list(range(places - 1, -1, -1))
        self._written = 0
        self._lock = threading.Lock()

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Returns where in memory the generations and the blocks begin, and the bytes from the first to the end of the
        others."""
        return self._map.generations.ctypes.data, self._map.blocks.ctypes.data, self._map.size

    def take(self, count: int) -> list[int]:
        with self._lock:
            if len(self._free) < count:
                return []
            return [self._free.pop() for _ in range(count)]

    def give_back(self, places: Iterable[int]) -> None:
        """Takes places back. Readers notice when they are written again."""
        with self._lock:
            self._free += places

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def rows(self) -> NDArray[np.uint8]:
        """Returns the memory of all places: one that is taken is written between `begin` and `finish`."""
        return self._map.blocks

    def begin(self, places: Iterable[int]) -> None:
        """Marks places as being written, which readers notice."""
        for place in places:
            self._map.generations[place] = 0

    def finish(self, place: int) -> int:
        """Makes a written place readable; returns its generation. For one thread."""
        self._written += 1
        self._map.generations[place] = self._written
        return self._written

    def write(self, place: int, data: bytes | memoryview) -> int:
        """Puts a block in a taken place; returns its generation. For one thread."""
        self.begin([place])
        self._map.block(place)[:] = data
        return self.finish(place)

    def generation(self, place: int) -> int:
        return int(self._map.generations[place])

    def read(self, place: int) -> memoryview:
        """Returns the block in a place, which the next block there changes."""
        return self._map.block(place)

    def prepare(self) -> None:
        if self.file >= 0:
            with suppress(OSError):
                os.posix_fallocate(self.file, 0, min(self._map.size, AT_ONCE))

    def close(self) -> None:
        """Closes the file. Processes that have mapped it can finish."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
