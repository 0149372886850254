"""A driver whose device is host memory: what is unmapped is overwritten, so that whoever still reads it is found."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from penstock.backend.cuda.driver import OUT_OF_MEMORY, DriverError

GARBAGE = 0xFF  # as floats it is NaN


class FakeDriver:
    """Counts what is mapped and pinned, and has no more than `room` bytes to map."""

    granularity = 1 << 12

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.mapped: dict[int, int] = {}  # sizes by address
        self.pinned: dict[int, int] = {}
        self.reserved: dict[int, Any] = {}

    def reserve(self, size: int) -> int:
        assert size % self.granularity == 0
        memory = (ctypes.c_ubyte * (size + self.granularity))()
        address = -(-ctypes.addressof(memory) // self.granularity) * self.granularity
        self.reserved[address] = memory
        return address

    def free(self, address: int, size: int) -> None:
        assert address not in self.mapped
        del self.reserved[address]

    def map(self, address: int, size: int, *, exportable: bool = False) -> int:
        assert address not in self.mapped
        if sum(self.mapped.values()) + size > self.room:
            raise DriverError("map", OUT_OF_MEMORY, "out of memory")
        ctypes.memset(address, GARBAGE, size)
        self.mapped[address] = size
        return address + 1

    def unmap(self, address: int, size: int, handle: int) -> None:
        assert handle == address + 1
        assert self.mapped.pop(address) == size
        ctypes.memset(address, GARBAGE, size)

    def pin(self, size: int) -> int:
        memory = ctypes.create_string_buffer(size)
        self.reserved[ctypes.addressof(memory)] = memory
        self.pinned[ctypes.addressof(memory)] = size
        return ctypes.addressof(memory)

    def unpin(self, host: int) -> None:
        del self.pinned[host], self.reserved[host]

    def to_host(self, host: int, address: int, size: int) -> None:
        assert self.mapped[address] == self.pinned[host] == size
        ctypes.memmove(host, address, size)

    def to_device(self, address: int, host: int, size: int) -> None:
        assert self.mapped[address] == self.pinned[host] == size
        ctypes.memmove(address, host, size)

    def zero(self, address: int, size: int) -> None:
        assert self.mapped[address] == size
        ctypes.memset(address, 0, size)

    def synchronize(self) -> None: ...

    def tensor(self, range: Any) -> Any:
        memory = (ctypes.c_ubyte * range.size).from_address(range.address)
        memory.owner = range  # lives as long as the tensor
        return torch.frombuffer(memory, dtype=torch.uint8)
