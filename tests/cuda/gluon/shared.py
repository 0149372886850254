"""Shared memory: its bytes as a GPU lays them out, and who has read and written them in which order.

Swizzles are not modelled: they permute 16-byte units by address, in the same way for every view of the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from triton.experimental.gluon import language as real

from tests.cuda.gluon.faults import KernelFault
from tests.cuda.gluon.registers import Tensor, item_bytes, torch_type

if TYPE_CHECKING:
    from tests.cuda.gluon.machine import Machine, Partition

GRAIN = 16  # bytes that accesses are noted by
AGENTS = 4  # partitions that may access shared memory


class Allocation:
    """Holds bytes of shared memory, and for each grain of them who wrote it last and when each partition last read it.
    Times are those of the vector clocks of `machine`."""

    def __init__(self, machine: Machine, size: int, name: str) -> None:
        grains = -(-size // GRAIN)
        self.machine, self.name = machine, name
        self.bytes = torch.full((grains * GRAIN,), 0xFF, dtype=torch.uint8)
        self.writer = np.zeros(grains, np.int64)
        self.written = np.zeros(grains, np.int64)
        self.same = np.zeros(grains, np.int64)  # a bit for each partition that has written the bytes that are there
        self.unfenced = np.zeros(grains, np.int64)  # a bit for each partition whose stores async accesses do not see
        self.read = np.zeros((AGENTS, grains), np.int64)

    def _ordered_after_writes(self, who: Partition, span: slice) -> np.ndarray:
        ordered = who.clock[self.writer[span]] >= self.written[span]
        return ordered | (self.same[span] >> who.agent & 1).astype(bool)

    def check_read(self, who: Partition, span: slice) -> None:
        """Reports a read that comes before or beside a write that it should come after."""
        ordered = self._ordered_after_writes(who, span)
        if not ordered.all():
            writer = self.machine.agents[self.writer[span][~ordered][0]]
            raise KernelFault(f"{who} reads {self.name}, and no barrier orders that after {writer}")

    def check_fenced(self, who: Partition, span: slice) -> None:
        """Reports an asynchronous access to what a partition stored, without a fence."""
        mine = np.where(self.same[span] >> who.agent & 1, 1 << who.agent, -1)
        if (self.unfenced[span] & mine).any():
            raise KernelFault(f"{who} lets an asynchronous access see stores to {self.name} without a fence")

    def check_write(self, who: Partition, span: slice) -> None:
        """Reports a write that comes before or beside another access that it should come after."""
        ordered = self._ordered_after_writes(who, span)
        if not ordered.all():
            writer = self.machine.agents[self.writer[span][~ordered][0]]
            raise KernelFault(f"{who} overwrites {self.name}, and no barrier orders that after {writer}")
        late = (self.read[:, span] > who.clock[:AGENTS, None]).any(1)
        if late.any():
            reader = self.machine.agents[int(late.argmax())]
            raise KernelFault(f"{who} overwrites {self.name}, and no barrier orders that after {reader} has read it")
        for product in self.machine.products:
            if product.reads(self, span):
                raise KernelFault(f"{who} overwrites {self.name}, which a product of {product.owner} still reads")

    def note_read(self, who: Partition, span: slice) -> None:
        self.read[who.agent, span] = who.clock[who.agent]

    def note_store(self, who: Partition, span: slice) -> None:
        self.writer[span], self.written[span] = who.agent, who.clock[who.agent]
        self.same[span] = self.unfenced[span] = 1 << who.agent

    def note_copy(self, agent: int, phase: int, span: slice) -> None:
        self.writer[span], self.written[span] = agent, phase
        self.same[span] = self.unfenced[span] = 0


class Shared:
    """Describes a view of shared memory, as kernels use it: contiguous bytes, with a type, a shape and a layout."""

    def __init__(
        self, memory: Allocation, start: int, dtype: Any, shape: Sequence[int], layout: Any, flipped: bool = False
    ) -> None:
        self.memory, self.start, self.dtype, self.layout, self.flipped = memory, start, dtype, layout, flipped
        self._shape = list(shape)
        self.size = int(np.prod(self._shape)) * item_bytes(dtype)
        if start < 0 or start + self.size > len(memory.bytes):
            raise KernelFault(f"a view {shape} at byte {start} does not fit into {memory.name}")

    @property
    def shape(self) -> list[int]:
        return self._shape[::-1] if self.flipped else self._shape

    @property
    def span(self) -> slice:
        """The grains of the view."""
        return slice(self.start // GRAIN, -(-(self.start + self.size) // GRAIN))

    def index(self, index: Any) -> Shared:
        """Returns the view of one element of the first dimension."""
        place, shape = int(index), self._shape[1:]
        if not 0 <= place < self._shape[0]:
            raise KernelFault(f"{self.memory.name} {self._shape} has no element {place}")
        size = int(np.prod(shape)) * item_bytes(self.dtype)
        return Shared(self.memory, self.start + place * size, self.dtype, shape, self.layout)

    def permute(self, order: Sequence[int]) -> Shared:
        """Returns the transposed view."""
        if tuple(order) != (1, 0) or len(self._shape) != 2:
            raise KernelFault(f"only the transposition of two dimensions is interpreted, not {order} of {self._shape}")
        return Shared(self.memory, self.start, self.dtype, self._shape, self.layout, not self.flipped)

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        """Returns a view of the same bytes."""
        found = Shared(self.memory, self.start, dtype, shape, layout)
        if found.size > self.size:
            raise KernelFault(f"a view {shape} takes {found.size} bytes, and there are {self.size}")
        return found

    def load(self, layout: Any) -> Tensor:
        """Returns the values, for a partition that may read them."""
        who = self.memory.machine.running
        if not who.may_race:
            self.memory.check_read(who, self.span)
        self.memory.note_read(who, self.span)
        return Tensor(self.values(), self.dtype, layout)

    def store(self, value: Tensor) -> None:
        """Writes values, for a partition that may write them."""
        who, memory = self.memory.machine.running, self.memory
        if list(value.shape) != self.shape or value.dtype != self.dtype:
            raise KernelFault(f"a store of {value.dtype} {value.shape} to {memory.name} {self.dtype} {self.shape}")
        before = memory.bytes[self.start : self.start + self.size].clone()
        if not who.may_race:
            memory.check_write(who, self.span)
            memory.note_store(who, self.span)
        self.write(value.data)
        if who.may_race:
            self._note_same(who, before)

    def _note_same(self, who: Partition, before: torch.Tensor) -> None:
        """Notes a store that others do too, with the same values: what it does not change is no write."""
        memory, first = self.memory, self.span.start
        changed = memory.bytes[self.start : self.start + self.size] != before
        for grain in np.flatnonzero(changed.view(-1, GRAIN).any(1).numpy()):
            span = slice(first + grain, first + grain + 1)
            memory.check_write(who, span)
            memory.note_store(who, span)
        memory.same[self.span] |= 1 << who.agent
        memory.unfenced[self.span] |= 1 << who.agent

    def values(self) -> torch.Tensor:
        """Returns the values in the order of the shape, whoever may read them."""
        flat = self.memory.bytes[self.start : self.start + self.size].view(torch_type(self.dtype))
        stored = flat.view(self._stored_shape())
        values = stored.movedim(-3, -2).reshape(self._shape) if stored.dim() > len(self._shape) else stored
        return (values.t() if self.flipped else values).clone()

    def write(self, values: torch.Tensor) -> None:
        """Writes values that are in the order of the shape."""
        values = values.t() if self.flipped else values
        shape = self._stored_shape()
        if len(shape) > len(self._shape):
            *outer, slabs, rows, width = shape
            values = values.reshape(*outer, rows, slabs, width).movedim(-2, -3)
        flat = values.contiguous().view(torch.uint8).reshape(-1)
        self.memory.bytes[self.start : self.start + self.size] = flat

    def _stored_shape(self) -> list[int]:
        """Returns the dimensions in the order of memory: a swizzled layout has slabs of columns as wide as a
        swizzle."""
        if not isinstance(self.layout, real.NVMMASharedLayout) or len(self._shape) < 2:
            return self._shape
        *outer, rows, columns = self._shape
        width = self.layout.swizzle_byte_width // item_bytes(self.dtype)
        if columns % width or self.start % (8 * self.layout.swizzle_byte_width):
            raise KernelFault(f"{self.memory.name} {self._shape} is no whole number of swizzled lines at {self.start}")
        return self._shape if columns == width else [*outer, columns // width, rows, width]
