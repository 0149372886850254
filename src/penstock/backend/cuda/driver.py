"""Calls the CUDA driver for what torch has no interface to: addresses that stay while their memory comes and goes.

Kernels and graphs hold addresses. A range of addresses is reserved once, and memory is mapped to it, taken away and
mapped again (https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ushort, c_void_p
from pathlib import Path
from typing import Any

import torch

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
ENDED = 4  # CUDA_ERROR_DEINITIALIZED: the process exits, and its memory with it
MAPS_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
EXPORTS_MEMORY = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: memory that does not migrate
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
LEAST_GRANULARITY = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
DEFAULT_STREAM = None
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class MemoryLocation(Structure):
    """Is CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(Structure):
    """Is the part `allocFlags` of CUmemAllocationProp."""

    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class AllocationProperties(Structure):
    """Is CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", MemoryLocation),
        ("win32", c_void_p),
        ("flags", AllocationFlags),
    )


class MemoryAccess(Structure):
    """Is CUmemAccessDesc."""

    _fields_ = (("location", MemoryLocation), ("flags", c_int))


class IpcHandle(Structure):
    """Is CUipcMemHandle."""

    _fields_ = (("reserved", c_ubyte * 64),)


Flags = Address = Handle = ctypes.c_ulonglong  # CUdeviceptr, CUmemGenericAllocationHandle
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemAddressReserve": (POINTER(Address), c_size_t, c_size_t, Address, Flags),
    "cuMemAddressFree": (Address, c_size_t),
    "cuMemCreate": (POINTER(Handle), c_size_t, POINTER(AllocationProperties), Flags),
    "cuMemRelease": (Handle,),
    "cuMemExportToShareableHandle": (POINTER(c_int), Handle, c_int, Flags),
    "cuMemImportFromShareableHandle": (POINTER(Handle), c_void_p, c_int),
    "cuMemMap": (Address, c_size_t, c_size_t, Handle, Flags),
    "cuMemUnmap": (Address, c_size_t),
    "cuMemSetAccess": (Address, c_size_t, POINTER(MemoryAccess), c_size_t),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (Address, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, Address, c_size_t, c_void_p),
    "cuMemAlloc_v2": (POINTER(Address), c_size_t),
    "cuMemFree_v2": (Address,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), Address),
    "cuIpcOpenMemHandle_v2": (POINTER(Address), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (Address,),
    "cuMemsetD8Async": (Address, c_ubyte, c_size_t, c_void_p),
}


class DriverError(RuntimeError):
    """Tells which call failed, and why."""

    def __init__(self, call: str, code: int, reason: str) -> None:
        super().__init__(f"{call} failed with CUDA error {code}: {reason}")
        self.code = code


class CudaDriver:
    """Implements MemoryDriver on one GPU. Copies are queued on the default stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library = open_library()
        self._call("cuInit", 0)
        number, context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(number), device.index or 0)
        self._call("cuDevicePrimaryCtxRetain", byref(context), number)  # torch's own; it lives as long as the process
        self._context = context
        self._location = MemoryLocation(ON_DEVICE, number.value)
        self._number = number
        self._properties = AllocationProperties(type=PINNED, location=self._location)
        self._exportable = AllocationProperties(type=PINNED, handle_types=FILE_DESCRIPTOR, location=self._location)
        granularity = c_size_t()
        self.maps_memory, self.exports_memory = self._has(MAPS_MEMORY), self._has(EXPORTS_MEMORY)
        if self.maps_memory:
            properties = byref(self._properties)
            self._call_on_device("cuMemGetAllocationGranularity", byref(granularity), properties, LEAST_GRANULARITY)
        self.granularity = granularity.value

    def reserve(self, size: int) -> int:
        address = Address()
        self._call_on_device("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        return address.value

    def free(self, address: int, size: int) -> None:
        self._call_on_device("cuMemAddressFree", address, size)

    def map(self, address: int, size: int, *, exportable: bool = False) -> int:
        handle, properties = Handle(), self._exportable if exportable else self._properties
        self._call_on_device("cuMemCreate", byref(handle), size, byref(properties), 0)
        return self._map(address, size, handle.value)

    def map_descriptor(self, address: int, size: int, descriptor: int) -> int:
        handle = Handle()
        self._call_on_device("cuMemImportFromShareableHandle", byref(handle), descriptor, FILE_DESCRIPTOR)
        return self._map(address, size, handle.value)

    def export(self, handle: int) -> int:
        descriptor = c_int()
        self._call_on_device("cuMemExportToShareableHandle", byref(descriptor), handle, FILE_DESCRIPTOR, 0)
        return descriptor.value

    def hold_device(self) -> list[int]:
        bus = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", bus, len(bus), self._number)
        known = Path("/proc/driver/nvidia/gpus", bus.value.decode().lower(), "information").read_text()
        minors = [line.split()[-1] for line in known.splitlines() if line.startswith("Device Minor")]
        return [os.open(f"/dev/nvidia{minor}", os.O_RDWR | os.O_CLOEXEC) for minor in minors]

    @property
    def total(self) -> int:
        size = c_size_t()
        self._call("cuDeviceTotalMem_v2", byref(size), self._number)
        return size.value

    def _has(self, attribute: int) -> bool:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), attribute, self._number)
        return bool(value.value)

    def _map(self, address: int, size: int, handle: int) -> int:
        """Maps memory to reserved addresses. If that fails, the memory is given back."""
        access = MemoryAccess(self._location, READ_AND_WRITE)
        try:
            self._call_on_device("cuMemMap", address, size, 0, handle, 0)
        except DriverError:
            self._call_on_device("cuMemRelease", handle)
            raise
        try:
            self._call_on_device("cuMemSetAccess", address, size, byref(access), 1)
        except DriverError:
            self.unmap(address, size, handle)
            raise
        return handle

    def unmap(self, address: int, size: int, handle: int) -> None:
        self._call_on_device("cuMemUnmap", address, size)
        self._call_on_device("cuMemRelease", handle)

    def pin(self, size: int) -> int:
        host = c_void_p()
        self._call_on_device("cuMemHostAlloc", byref(host), size, 0)
        return host.value or 0

    def unpin(self, host: int) -> None:
        self._call_on_device("cuMemFreeHost", host)

    def to_host(self, host: int, address: int, size: int) -> None:
        self._call_on_device("cuMemcpyDtoHAsync_v2", host, address, size, DEFAULT_STREAM)

    def to_device(self, address: int, host: int, size: int) -> None:
        self._call_on_device("cuMemcpyHtoDAsync_v2", address, host, size, DEFAULT_STREAM)

    def zero(self, address: int, size: int) -> None:
        self._call_on_device("cuMemsetD8Async", address, 0, size, DEFAULT_STREAM)

    def allocate(self, size: int) -> int:
        """Returns the address of memory that other processes may open, which mapped memory is not."""
        address = Address()
        self._call_on_device("cuMemAlloc_v2", byref(address), size)
        return address.value

    def release(self, address: int) -> None:
        """Gives back what `allocate` returned."""
        self._call_on_device("cuMemFree_v2", address)

    def export_handle(self, address: int) -> bytes:
        """Returns what another process opens allocated memory with."""
        handle = IpcHandle()
        self._call_on_device("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle.reserved)

    def open_handle(self, handle: bytes) -> int:
        """Returns the address of memory that another process has exported; raises DriverError if it is gone, or is this
        process's own."""
        address, known = Address(), IpcHandle()
        ctypes.memmove(byref(known), handle.ljust(ctypes.sizeof(known), b"\0"), ctypes.sizeof(known))
        self._call_on_device("cuIpcOpenMemHandle_v2", byref(address), known, LAZY_PEER_ACCESS)
        return address.value

    def close_handle(self, address: int) -> None:
        """Lets go of memory that `open_handle` returned."""
        self._call_on_device("cuIpcCloseMemHandle", address)

    def synchronize(self) -> None:
        self._call_on_device("cuCtxSynchronize")

    def tensor(self, range: Any) -> Any:
        """Returns the bytes of an object with `__cuda_array_interface__`, which lives as long as the tensor."""
        return torch.as_tensor(range, device=self._device)

    def _call_on_device(self, name: str, *arguments: Any) -> None:
        """Calls the driver in the device's context, whichever is the thread's own."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        """Calls the driver; raises DriverError for what it answers."""
        code = getattr(self._library, name)(*arguments)
        if code in (0, ENDED):
            return
        text = c_char_p()
        self._library.cuGetErrorString(code, byref(text))
        raise DriverError(name, code, (text.value or b"unknown error").decode())


def open_library() -> ctypes.CDLL:
    """Opens the driver's library, which torch has loaded already, and says what its functions take."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    return library
