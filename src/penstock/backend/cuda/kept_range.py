"""Hands out device memory whose parts other processes can map, and which outlives this process if one of them does."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.backend.cuda.arena import ALIGNMENT, Arena, MemorySegment, array_interface
from penstock.backend.cuda.driver import DriverError
from penstock.errors import OutOfMemory

PARTS = 256  # a range has at most this number of file descriptors


@dataclass(frozen=True, slots=True)
class RangeBytes:
    """Describes bytes of a range, which lives as long as they do."""

    owner: KeptRange
    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return array_interface(self.address, self.size)


class KeptRange:
    """Is a range of addresses as large as the device's memory. Memory is mapped to it from the beginning on, part by
    part, as tensors take it one after the other."""

    def __init__(self, arena: Arena, kept: bool) -> None:
        assert arena.driver is not None
        self.restored = False  # another process has filled it
        self.used = 0  # bytes
        self._arena = arena
        self._driver = arena.driver
        self._kept = kept
        self._unit = -(-self._driver.total // PARTS // self._driver.granularity) * self._driver.granularity
        self._size = PARTS * self._unit
        self._parts: list[MemorySegment] = []
        self._address = 0
        self._address = self._driver.reserve(self._size)

    @property
    def sizes(self) -> list[int]:
        """Returns the bytes of each part."""
        return [part.size for part in self._parts]

    def take(self, size: int) -> Any:
        """Returns the next bytes as a tensor, at least one; raises OutOfMemory."""
        size = max(size, 1)
        first, end = self.used, self.used + size
        while (mapped := sum(self.sizes)) < end:
            if mapped == self._size:
                raise OutOfMemory(f"the device has no memory for {size} bytes")
            part = MemorySegment(self._driver, self._unit, self._kept, at=self._address + mapped)
            self._arena.add(part)
            self._parts.append(part)
        self.used = -(-end // ALIGNMENT) * ALIGNMENT
        return self.view(first, size)

    def view(self, offset: int, size: int) -> Any:
        """Returns bytes of the range as a tensor."""
        return self._driver.tensor(RangeBytes(self, self._address + offset, size))

    def offset_of(self, address: int, size: int) -> int:
        """Returns where bytes lie in the range; raises ValueError if they do not."""
        offset = address - self._address
        if not 0 <= offset <= offset + size <= self.used:
            raise ValueError("a weight is not where it can be kept")
        return offset

    def export(self) -> list[int]:
        """Returns a descriptor of each part."""
        descriptors: list[int] = []
        try:
            for part in self._parts:
                descriptors.append(part.export())
        except DriverError:
            for each in descriptors:
                os.close(each)
            raise
        return descriptors

    def restore(self, sizes: Sequence[int], descriptors: Sequence[int]) -> None:
        """Maps the parts that another process has exported, for tensors to take once more. Raises DriverError."""
        for size, descriptor in zip(sizes, descriptors, strict=True):
            part = MemorySegment(self._driver, size, self._kept, at=self._address + sum(self.sizes))
            part.map_descriptor(descriptor)
            self._arena.add(part)
            self._parts.append(part)
        self.restored = True

    def __del__(self) -> None:
        if sys.is_finalizing():  # the driver frees what the process has
            return
        self._parts.clear()
        if self._address:
            with suppress(DriverError):
                self._driver.free(self._address, self._size)
