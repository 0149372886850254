"""A driver whose exportable memory is shared memory of the host: it outlives the process that has made it, as memory of
a GPU does whose descriptor somebody holds."""

from __future__ import annotations

import ctypes
import os

from penstock.backend.cuda.driver import OUT_OF_MEMORY, DriverError
from tests.cuda.fake_driver import GARBAGE, FakeDriver

READ_WRITE, SHARED, FIXED, ANYWHERE = 3, 1, 0x10, 0x4022  # the last: private, anonymous, not reserved
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class SharedDriver(FakeDriver):
    """Is a device with `total` bytes of memory, which `exports` it or not."""

    def __init__(self, total: int = 1 << 26, exports: bool = True) -> None:
        super().__init__(total)
        self.total = total
        self.exports_memory = exports
        self.fail = ""  # the next call of this name fails
        self.ranges: dict[int, int] = {}  # sizes by address
        self.shared: set[int] = set()  # handles

    def reserve(self, size: int) -> int:
        address = LIBC.mmap(0, size, READ_WRITE, ANYWHERE, -1, 0)
        self.ranges[address] = size
        return int(address)

    def free(self, address: int, size: int) -> None:
        assert self.ranges.pop(address) == size
        LIBC.munmap(address, size)

    def map(self, address: int, size: int, *, exportable: bool = False) -> int:
        if not exportable:
            return super().map(address, size)
        self._may_fail("map")
        if sum(self.mapped.values()) + size > self.room:
            raise DriverError("map", OUT_OF_MEMORY, "out of memory")
        handle = os.memfd_create("device")
        os.ftruncate(handle, size)
        self._map_shared(address, size, handle)
        ctypes.memset(address, GARBAGE, size)
        return handle

    def map_descriptor(self, address: int, size: int, descriptor: int) -> int:
        self._may_fail("map_descriptor")
        assert os.fstat(descriptor).st_size == size
        handle = os.dup(descriptor)
        self._map_shared(address, size, handle)
        return handle

    def unmap(self, address: int, size: int, handle: int) -> None:
        if handle not in self.shared:
            return super().unmap(address, size, handle)
        assert self.mapped.pop(address) == size
        self.shared.remove(handle)
        os.close(handle)
        LIBC.mmap(address, size, READ_WRITE, ANYWHERE | FIXED, -1, 0)

    def export(self, handle: int) -> int:
        self._may_fail("export")
        assert handle in self.shared
        return os.dup(handle)

    def hold_device(self) -> list[int]:
        return [os.open("/dev/null", os.O_RDWR)]

    def _map_shared(self, address: int, size: int, handle: int) -> None:
        assert address not in self.mapped
        assert LIBC.mmap(address, size, READ_WRITE, SHARED | FIXED, handle, 0) == address
        self.mapped[address] = size
        self.shared.add(handle)

    def _may_fail(self, name: str) -> None:
        if name == self.fail:
            self.fail = ""
            raise DriverError(name, 999, "unknown error")
