"""Shares copies of KV blocks with other processes on the same GPU: they are read from device memory to device memory.

The memory is the driver's own and not torch's: only whole allocations can be shared, and torch's hold other things too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from struct import Struct
from typing import Any, Protocol

import torch

from penstock.backend.blocks.checksum import word_weights
from penstock.backend.cuda.driver import CudaDriver, DriverError

SHARE = 8  # a room may take an eighth of the device's free memory
AT_ONCE = 32 << 20  # bytes copied and added up at once; adding up takes five times this
LAYOUT = Struct("<QQ")  # places, bytes of a block; then the memory's own handle
DEEPEST = (1 << 64) - 1


class IpcMemory(Protocol):
    """Takes memory of a device that other processes can open."""

    def free(self) -> int: ...

    def take(self, size: int) -> tuple[Any, bytes]:
        """Returns memory, as a tensor of bytes, and what another process opens it with. Raises OSError."""

    def give_back(self, memory: Any) -> None: ...

    def open(self, handle: bytes, size: int) -> Any:
        """Returns memory that another process has taken, as a tensor of bytes. Raises OSError."""

    def close(self, memory: Any) -> None: ...


class DeviceRange:
    """Is a range of device memory as torch takes it."""

    def __init__(self, address: int, size: int) -> None:
        shape, data = (size,), (address, False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": data, "strides": None, "version": 2}


class CudaIpcMemory:
    """Implements IpcMemory by handles of the driver (cuIpcGetMemHandle)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = CudaDriver(device)

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def take(self, size: int) -> tuple[Any, bytes]:
        try:
            address = self._driver.allocate(size)
            return self._tensor(address, size), self._driver.export_handle(address)
        except DriverError as error:
            raise OSError(str(error)) from error

    def give_back(self, memory: Any) -> None:
        self._driver.synchronize()
        self._driver.release(memory.data_ptr())

    def open(self, handle: bytes, size: int) -> Any:
        try:
            return self._tensor(self._driver.open_handle(handle), size)
        except DriverError as error:
            raise OSError(str(error)) from error

    def close(self, memory: Any) -> None:
        self._driver.synchronize()
        self._driver.close_handle(memory.data_ptr())

    def _tensor(self, address: int, size: int) -> Any:
        return self._driver.tensor(DeviceRange(address, size))


class KvRows:
    """Reads and writes whole blocks, which lie in many arrays: a row of bytes is one block."""

    def __init__(
        self, parts: Sequence[Any], device: torch.device, on_stream: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._parts = parts  # [blocks, bytes] each
        self._sizes = [part.shape[1] for part in parts]
        self._device = device
        self.on_stream = on_stream  # the stream that steps are queued on
        self.block_bytes = sum(self._sizes)
        self.at_once = max(AT_ONCE // self.block_bytes, 1)
        self._weights = torch.from_numpy(word_weights(self.block_bytes // 4)).to(device)

    def gather(self, blocks: Sequence[int]) -> Any:
        index = self.index(blocks)
        return torch.cat([part[index] for part in self._parts], dim=1)

    def scatter(self, rows: Any, blocks: Sequence[int]) -> None:
        index = self.index(blocks)
        for part, columns in zip(self._parts, rows.split(self._sizes, dim=1), strict=True):
            part.index_copy_(0, index, columns)

    def checksums(self, rows: Any) -> Any:
        return (rows.view(torch.int32).to(torch.int64) * self._weights).sum(dim=1)

    def index(self, numbers: Sequence[int]) -> Any:
        return torch.tensor(numbers, device=self._device)

    def in_turn(self, copy: Callable[[slice], Any], count: int) -> list[int]:
        """Copies some blocks at a time and returns the checksums of all, once they are known: the copies have then
        happened."""
        with self.on_stream():
            sums = [copy(slice(at, at + self.at_once)) for at in range(0, count, self.at_once)]
            found = torch.cat(sums).cpu()
        return [each & DEEPEST for each in found.tolist()]


class CudaSharedRoom:
    """Implements SharedRoom."""

    def __init__(self, rows: KvRows, memory: IpcMemory, places: int) -> None:
        self._rows = rows
        self._memory = memory
        self.places = min(places, memory.free() // SHARE // rows.block_bytes)
        if not self.places:
            raise OSError(f"the device has no room for KV blocks of {rows.block_bytes} bytes that others may read")
        self._bytes, handle = memory.take(self.places * rows.block_bytes)
        self._staged = self._bytes.view(self.places, rows.block_bytes)
        self.handle = LAYOUT.pack(self.places, rows.block_bytes) + handle

    def write(self, blocks: Sequence[int], places: Sequence[int]) -> list[int]:
        rows = self._rows

        def copy(part: slice) -> Any:
            found = rows.gather(blocks[part])
            self._staged.index_copy_(0, rows.index(places[part]), found)
            return rows.checksums(found)

        return rows.in_turn(copy, len(blocks))

    def close(self) -> None:
        self._memory.give_back(self._bytes)
        self._staged = self._bytes = None


class CudaOpenedRoom:
    """Implements OpenedRoom."""

    def __init__(self, rows: KvRows, memory: IpcMemory, handle: bytes) -> None:
        if len(handle) < LAYOUT.size:
            raise OSError(f"a handle to shared KV blocks has {LAYOUT.size} bytes and more; got {len(handle)}")
        places, block_bytes = LAYOUT.unpack_from(handle)
        if block_bytes != rows.block_bytes:
            raise OSError(f"KV blocks have {rows.block_bytes} bytes here and {block_bytes} where they are offered")
        self._rows = rows
        self._memory = memory
        self._bytes = memory.open(handle[LAYOUT.size :], places * block_bytes)
        self._staged = self._bytes.view(places, block_bytes)

    def read(self, places: Sequence[int], blocks: Sequence[int]) -> list[int]:
        rows = self._rows
        if places and not 0 <= min(places) <= max(places) < len(self._staged):
            raise IndexError(f"places {min(places)} to {max(places)} are not among {len(self._staged)}")

        def copy(part: slice) -> Any:
            found = self._staged[rows.index(places[part])]
            rows.scatter(found, blocks[part])
            return rows.checksums(found)

        return rows.in_turn(copy, len(places))

    def close(self) -> None:
        self._memory.close(self._bytes)
        self._staged = self._bytes = None


class CudaSharing:
    """Implements DeviceSharing over the blocks that `rows` returns once they are reserved."""

    def __init__(self, name: str, rows: Callable[[], KvRows], memory: Callable[[], IpcMemory]) -> None:
        self.name = name
        self._open_rows = rows
        self._open_memory = memory
        self._rows: KvRows | None = None
        self._memory: IpcMemory | None = None

    @classmethod
    def of(cls, device: torch.device, rows: Callable[[], KvRows]) -> CudaSharing | None:
        """Returns the sharing of a device's blocks; None without a name that other processes know."""
        name = device_name(device)
        return cls(name, rows, lambda: CudaIpcMemory(device)) if name else None

    def share(self, places: int) -> CudaSharedRoom:
        return CudaSharedRoom(*self._opened(), places)

    def open(self, handle: bytes) -> CudaOpenedRoom:
        return CudaOpenedRoom(*self._opened(), handle)

    def _opened(self) -> tuple[KvRows, IpcMemory]:
        self._rows = self._rows or self._open_rows()
        self._memory = self._memory or self._open_memory()
        return self._rows, self._memory


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU that all its processes know it by; empty if it has none."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
