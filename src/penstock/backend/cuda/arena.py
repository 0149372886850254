"""Holds weights, KV cache and buffers at addresses that stay the same while their memory is given back and taken again.

So a model can sleep: its weights move to pinned host memory, all other contents are dropped, and the GPU's memory is
free for others. When it wakes, everything is where graphs expect it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import torch

from penstock.backend.cuda.driver import OUT_OF_MEMORY, CudaDriver, DriverError
from penstock.config import available_memory
from penstock.errors import OutOfMemory

if TYPE_CHECKING:
    from penstock.backend.cuda.keeper import CudaKeeper
    from penstock.backend.cuda.kept_range import KeptRange

ALIGNMENT = 512  # bytes, as torch's own
SHARED_BYTES = 16 << 20  # a segment for small tensors
SMALL_BYTES = 1 << 20  # tensors below this are small
MOVED_BYTES = 1 << 30  # torch gives memory back after so much of it was moved
HOST_SPARE = 1 << 30  # host memory that sleeping leaves to others


class MemoryDriver(Protocol):
    """Maps memory of a device to addresses. Sizes are multiples of `granularity`; copies are queued, in order."""

    granularity: int
    exports_memory: bool

    @property
    def total(self) -> int:
        """Returns the bytes of memory that the device has."""

    def reserve(self, size: int) -> int:
        """Returns the first of `size` addresses that nothing else gets."""

    def free(self, address: int, size: int) -> None: ...

    def map(self, address: int, size: int, *, exportable: bool = False) -> int:
        """Takes memory of the device and maps it to reserved addresses; returns its handle. Raises DriverError."""

    def export(self, handle: int) -> int:
        """Returns a file descriptor of exportable memory, which lives until all its descriptors, handles and mappings
        are gone. Raises DriverError."""

    def map_descriptor(self, address: int, size: int, descriptor: int) -> int:
        """Maps memory that a process has exported; returns its handle. Raises DriverError."""

    def hold_device(self) -> list[int]:
        """Returns descriptors that keep the device initialized, and its memory with it. Raises OSError."""

    def unmap(self, address: int, size: int, handle: int) -> None:
        """Gives the memory back. Nothing may be using it."""

    def pin(self, size: int) -> int:
        """Returns the address of host memory that the device copies from at full speed."""

    def unpin(self, host: int) -> None: ...

    def to_host(self, host: int, address: int, size: int) -> None: ...

    def to_device(self, address: int, host: int, size: int) -> None: ...

    def zero(self, address: int, size: int) -> None: ...

    def synchronize(self) -> None: ...

    def tensor(self, range: Any) -> Any:
        """Returns a segment's bytes as a tensor, as long as which the segment lives."""


class MemorySegment:
    """Is a range of addresses and, unless it sleeps, the memory there. It ends with the last tensor in it. A segment
    `at` an address that is reserved already can be exported."""

    def __init__(self, driver: MemoryDriver, size: int, kept: bool, at: int = 0) -> None:
        self._driver = driver
        self._handle: int | None = None
        self._exportable = at != 0
        self.size = size
        self.kept = kept  # its contents survive sleeping
        self.host = 0  # the address of its contents in host memory; 0: there are none
        self.address = at
        self.address = at or driver.reserve(size)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return array_interface(self.address, self.size)

    @property
    def mapped(self) -> bool:
        return self._handle is not None

    def map(self) -> None:
        self._handle = self._driver.map(self.address, self.size, exportable=self._exportable)

    def map_descriptor(self, descriptor: int) -> None:
        self._handle = self._driver.map_descriptor(self.address, self.size, descriptor)

    def export(self) -> int:
        assert self._handle is not None, "what sleeps has no memory"
        return self._driver.export(self._handle)

    def unmap(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._driver.unmap(self.address, self.size, handle)

    def save(self) -> None:
        """Queues the copy of its contents to host memory, which stays pinned for the next time."""
        if not self.host:
            self.host = self._driver.pin(self.size)
        self._driver.to_host(self.host, self.address, self.size)

    def restore(self) -> None:
        """Queues what makes its contents those that it had, or zeros if they were not kept."""
        if self.kept:
            self._driver.to_device(self.address, self.host, self.size)
        else:
            self._driver.zero(self.address, self.size)

    def __del__(self) -> None:
        if sys.is_finalizing():  # the driver frees what the process has
            return
        if self._handle is not None:
            self._driver.synchronize()  # what is queued may still use it
            self.unmap()
        if self.address and not self._exportable:
            self._driver.free(self.address, self.size)
        if self.host:
            self._driver.unpin(self.host)


def array_interface(address: int, size: int) -> dict[str, Any]:
    """Describes bytes on a device, for torch."""
    return {"shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2}


class Arena:
    """Allocates tensors on a device. Without a driver they are torch's own, and the arena cannot sleep."""

    def __init__(self, device: torch.device, driver: MemoryDriver | None = None) -> None:
        self.device = device
        self.driver = driver
        self._segments: WeakSet[MemorySegment] = WeakSet()
        self._shared: dict[bool, tuple[Any, int]] = {}  # bytes that small tensors share, and how many are taken
        self._ranges: dict[bool, KeptRange] = {}  # from which tensors come now, by whether they are kept
        self.keeper: CudaKeeper | None = None
        self.shared: dict[type, Any] = {}

    @classmethod
    def on(cls, device: torch.device) -> Arena:
        if device.type != "cuda":
            return cls(device)
        driver = CudaDriver(device)
        return cls(device, driver if driver.maps_memory else None)

    def share(self, *parts: Any) -> None:
        """Sets the parts of packed weights of which each process has its own."""
        self.shared = {type(part): part for part in parts}

    @property
    def can_sleep(self) -> bool:
        return self.driver is not None

    @property
    def kept_bytes(self) -> int:
        return sum(segment.size for segment in self._segments if segment.kept)

    @property
    def host_bytes(self) -> int:
        return sum(segment.size for segment in self._segments if segment.host)

    @property
    def device_bytes(self) -> int:
        return sum(segment.size for segment in self._segments if segment.mapped)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, kept: bool = True) -> Any:
        """Returns a tensor of any contents. They survive sleeping if they are `kept`; else they become zeros."""
        if self.driver is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        size = prod(shape) * dtype.itemsize
        return self._bytes(size, kept)[:size].view(dtype).view(tuple(shape))

    def zeros(self, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Any:
        """Returns a tensor of zeros, which it has again after sleeping."""
        tensor = self.empty((shape,) if isinstance(shape, int) else shape, dtype, kept=False)
        return tensor if False in self._ranges and self._ranges[False].restored else tensor.zero_()

    def use(self, range: KeptRange | None, kept: bool) -> None:
        """Takes all further tensors that are `kept`, or all others, from a range; without one, from new segments."""
        self._ranges.pop(kept, None)
        if range is not None:
            self._ranges[kept] = range

    def add(self, segment: MemorySegment) -> None:
        """Maps a segment, if it is not mapped yet, which sleeps and wakes with all others."""
        if not segment.mapped:
            self._map(segment)
        self._segments.add(segment)

    def adopt(self, owner: Any) -> None:
        """Moves all tensors of the device that an object holds into the arena, unless they are in it already. Tensors
        with one storage keep sharing it."""
        if self.driver is None:
            return
        storages: dict[int, dict[int, Any]] = {}  # tensors by address and identity
        for tensor in tensors_in(owner):
            if tensor.device == self.device and tensor.untyped_storage().nbytes():
                viewed = () if tensor._base is None else (tensor._base,)  # a view keeps what it was made of
                sharing = storages.setdefault(tensor.untyped_storage().data_ptr(), {})
                sharing.update({id(each): each for each in (tensor, *viewed)})
        moved = 0
        for address in [address for address in storages if not self._holds(address)]:
            moved += self._move(list(storages.pop(address).values()))
            if moved > MOVED_BYTES:
                release_cached(self.device)
                moved = 0
        release_cached(self.device)

    def sleep(self) -> None:
        """Copies what is kept to host memory and gives all device memory back; raises OutOfMemory where the host has
        too little. Nothing may use the tensors until `wake`."""
        assert self.driver is not None
        kept = [segment for segment in self._segments if segment.kept and segment.mapped]
        needed = sum(segment.size for segment in kept if not segment.host)
        if needed + HOST_SPARE > (free := available_memory()):
            raise OutOfMemory(f"sleeping takes {needed} bytes of host memory and {free} are free: unload the model")
        self.driver.synchronize()
        try:
            for segment in kept:
                segment.save()
        except DriverError as error:
            raise OutOfMemory(f"sleeping takes {needed} bytes of pinned host memory: {error}") from error
        self.driver.synchronize()
        for segment in self._segments:
            segment.unmap()

    def wake(self) -> None:
        """Undoes `sleep`. Raises OutOfMemory, and still sleeps, if the device has too little memory now."""
        assert self.driver is not None
        asleep = sorted(self._segments, key=lambda segment: not segment.kept)  # mapping the rest overlaps with copies
        asleep = [segment for segment in asleep if not segment.mapped]
        try:
            for segment in asleep:
                self._map(segment)
                segment.restore()
        except OutOfMemory:
            self.driver.synchronize()
            for segment in asleep:
                segment.unmap()
            raise
        self.driver.synchronize()

    def _bytes(self, size: int, kept: bool) -> Any:
        """Returns at least so many bytes. Those of small tensors come from a segment that they share; they are given
        back when all of them are."""
        if kept in self._ranges:
            return self._ranges[kept].take(size)
        if size >= SMALL_BYTES:
            return self._new_segment(size, kept)
        shared, taken = self._shared.get(kept, (None, SHARED_BYTES))
        if taken + size > SHARED_BYTES:
            shared, taken = self._new_segment(SHARED_BYTES, kept), 0
        self._shared[kept] = shared, taken + -(-size // ALIGNMENT) * ALIGNMENT
        return shared[taken:]

    def _new_segment(self, size: int, kept: bool) -> Any:
        assert self.driver is not None
        granularity = self.driver.granularity
        segment = MemorySegment(self.driver, -(-size // granularity) * granularity, kept)
        self.add(segment)
        return self.driver.tensor(segment)

    def _map(self, segment: MemorySegment) -> None:
        try:
            segment.map()
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            release_cached(self.device)
            try:
                segment.map()
            except DriverError as again:
                raise OutOfMemory(f"the device has no memory for {segment.size} bytes: {again}") from again

    def _holds(self, address: int) -> bool:
        return any(segment.address <= address < segment.address + segment.size for segment in self._segments)

    def _move(self, tensors: Sequence[Any]) -> int:
        """Moves tensors of one storage; returns its bytes."""
        storage = tensors[0].untyped_storage()
        size = storage.nbytes()
        target = self.empty((size,), torch.uint8)
        target.copy_(torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (size,), (1,)))
        for tensor in tensors:
            offset = target.storage_offset() // tensor.element_size() + tensor.storage_offset()
            tensor.set_(target.untyped_storage(), offset, tensor.shape, tensor.stride())
        return int(size)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yields each tensor in dataclasses, tuples, lists and dicts once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    for part in parts_of(value):
        yield from tensors_in(part, seen)


def parts_of(value: Any) -> Iterable[Any]:
    """Returns what a dataclass or a collection consists of; nothing for other values."""
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def release_cached(device: torch.device) -> None:
    """Has torch give back memory that it keeps for later."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
