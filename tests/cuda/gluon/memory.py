"""Global memory: loads and stores that check that pointers stay within the tensor they were made for."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from triton.experimental.gluon import language as real

from tests.cuda.gluon.faults import KernelFault
from tests.cuda.gluon.registers import BITS, TYPES, Tensor, converted, item_bytes, layout_of, torch_type, wrapped

POISON = -1  # bits of what nobody wrote: NaN, as a float of any size


class Memory:
    """Holds the bytes of a tensor from its first element to its last, whatever its strides."""

    def __init__(self, tensor: torch.Tensor) -> None:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        start = tensor.storage_offset() * tensor.element_size()
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (size,))
        self.address, self.shape = tensor.data_ptr(), tuple(tensor.shape)

    def __str__(self) -> str:
        return f"the tensor {list(self.shape)}"


def pointer_to(tensor: torch.Tensor) -> Tensor:
    """Returns the pointer that a kernel gets for a tensor."""
    return Tensor(tensor.data_ptr(), real.pointer_type(TYPES[tensor.dtype]), None, Memory(tensor))


def found(pointer: Tensor, addresses: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory as integers of `size` bytes, and the place of each address in it."""
    low, high = int(addresses.min()), int(addresses.max())
    if pointer.origin is None:
        raw = (ctypes.c_ubyte * (high + size - low)).from_address(low)
        return torch.frombuffer(raw, dtype=BITS[size]), (addresses - low) // size
    base, extent = pointer.origin.address, len(pointer.origin.bytes)
    if low < base or high + size > base + extent:
        raise KernelFault(
            f"bytes {low - base} to {high + size - base} of {pointer.origin} do not exist: it has {extent}"
        )
    offset = addresses - base
    if bool((offset % size).any()):
        raise KernelFault(f"a pointer into {pointer.origin} is not aligned to its {size} bytes")
    return pointer.origin.bytes[: extent // size * size].view(BITS[size]), offset // size


def spread(pointer: Tensor, mask: Any, *others: Tensor) -> list[torch.Tensor]:
    """Returns addresses, mask and others as tensors of one shape."""
    mask = wrapped(True if mask is None else mask)
    return list(torch.broadcast_tensors(*(torch.as_tensor(value.data) for value in (pointer, mask, *others))))


def load(pointer: Tensor, mask: Any = None, other: Any = None, cache_modifier: str = "") -> Tensor:
    """Returns what memory holds where the mask is set, else `other`, else poison."""
    dtype = pointer.dtype.element_ty
    size = item_bytes(dtype)
    addresses, wanted = spread(pointer, mask)
    if other is None:
        bits = torch.full(addresses.shape, POISON, dtype=BITS[size])
    else:
        values = torch.as_tensor(converted(wrapped(other).data, dtype), dtype=torch_type(dtype))
        bits = values.broadcast_to(addresses.shape).contiguous().view(BITS[size])
    if bool(wanted.any()):
        memory, places = found(pointer, addresses[wanted], size)
        bits = bits.clone()
        bits[wanted] = memory[places]
    data = bits.view(torch_type(dtype))
    mask = mask if isinstance(mask, Tensor) else pointer
    return Tensor(data if data.dim() else data.item(), dtype, layout_of(pointer, mask))


def store(pointer: Tensor, value: Any, mask: Any = None) -> None:
    """Writes values where the mask is set."""
    dtype = pointer.dtype.element_ty
    size = item_bytes(dtype)
    addresses, wanted, values = spread(pointer, mask, wrapped(value).to(dtype))
    if bool(wanted.any()):
        memory, places = found(pointer, addresses[wanted], size)
        memory[places] = values.to(torch_type(dtype)).contiguous().view(BITS[size])[wanted]


def atomic_add(pointer: Tensor, value: Any) -> Tensor:
    """Adds to a scalar in memory; returns what was there."""
    before = load(pointer)
    store(pointer, before + value)
    return before
