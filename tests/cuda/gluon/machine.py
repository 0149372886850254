"""One program of a kernel: its partitions, and all that goes on beside them.

Time is kept by vector clocks. Every partition has an entry, and so has every barrier: its phases are the times of the
copies that it counts. An arrival leaves the clock of its partition at the barrier, and who waits takes it from there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as real

from tests.cuda.gluon.faults import KernelFault
from tests.cuda.gluon.registers import Tensor, item_bytes
from tests.cuda.gluon.shared import AGENTS, Allocation, Shared

ENTRIES = 64  # of a vector clock
MAY_RACE = {"_clear_tail"}  # functions in which partitions write the same values over what they read there


class Stopped(BaseException):
    """Ends a partition after another one has failed."""


class Partition:
    """Stands for warps that run one function."""

    def __init__(self, agent: int, name: str, warps: int, clock: np.ndarray) -> None:
        self.agent, self.name, self.warps, self.clock = agent, name, warps, clock.copy()
        self.clock[agent] += 1
        self.calls: list[str] = []
        self.waits_for = ""  # empty: it can run
        self.woken: Barrier | None = None
        self.baton = threading.Semaphore(0)
        self.done = False

    def __str__(self) -> str:
        return self.name

    @property
    def may_race(self) -> bool:
        return bool(MAY_RACE & {*self.calls})

    def release(self, into: np.ndarray) -> None:
        """Leaves the clock for whoever waits, and begins a new time."""
        np.maximum(into, self.clock, out=into)
        self.clock[self.agent] += 1

    def acquire(self, clock: np.ndarray) -> None:
        np.maximum(self.clock, clock, out=self.clock)


class Barrier:
    """Counts arrivals and bytes of copies, in phases."""

    def __init__(self, agent: int, name: str, count: int) -> None:
        self.agent, self.name, self.count = agent, name, count
        self.missing, self.bytes, self.phases = count, 0, 0
        self.released, self.clock = np.zeros(ENTRIES, np.int64), np.zeros(ENTRIES, np.int64)

    def __str__(self) -> str:
        return self.name

    def has_completed(self, parity: int) -> bool:
        return self.phases & 1 != parity

    def completes(self) -> bool:
        """Begins the next phase if nothing is missing; returns whether it did."""
        if self.missing or self.bytes:
            return False
        self.phases, self.missing = self.phases + 1, self.count
        np.maximum(self.clock, self.released, out=self.clock)
        self.clock[self.agent] = self.phases
        return True


class NamedBarrier:
    """Counts the threads that have come to one of the hardware's sixteen barriers."""

    def __init__(self) -> None:
        self.threads, self.clock = 0, np.zeros(ENTRIES, np.int64)
        self.waiting: list[Partition] = []


class Copy:
    """A copy of a box of a tensor that has begun, and has not landed."""

    def __init__(self, source: Any, place: list[int], barrier: Barrier, to: Shared) -> None:
        self.source, self.place, self.barrier, self.to, self.phase = source, place, barrier, to, barrier.phases

    def land(self) -> None:
        """Writes the box, with zeros where the tensor has nothing."""
        if self.barrier.phases != self.phase:
            raise KernelFault(f"a copy began in phase {self.phase} of {self.barrier}, which is over before it landed")
        base, shape = self.source.base, self.source.block_shape
        box = torch.zeros(shape, dtype=torch.uint8 if base.element_size() == 1 else base.dtype)
        tensor = base.view(torch.uint8) if base.element_size() == 1 else base
        inside = [
            slice(max(at, 0), max(min(at + n, m), 0)) for at, n, m in zip(self.place, shape, base.shape, strict=True)
        ]
        found = tensor[tuple(inside)]
        if found.numel():
            to = [slice(part.start - at, part.stop - at) for part, at in zip(inside, self.place, strict=True)]
            box[tuple(to)] = found
        self.to.write(box)
        self.barrier.bytes -= self.to.size


class Product:
    """A product of tensor cores that has begun. Its sums are computed when it is waited for."""

    def __init__(self, owner: Partition, a: Tensor | Shared, b: Shared, before: Any) -> None:
        self.owner, self.a, self.b, self.before = owner, a, b, before
        self.sums: Tensor | None = None

    @property
    def operands(self) -> list[Shared]:
        return [operand for operand in (self.a, self.b) if isinstance(operand, Shared)]

    def reads(self, memory: Allocation, span: slice) -> bool:
        return any(
            operand.memory is memory and operand.span.start < span.stop and span.start < operand.span.stop
            for operand in self.operands
        )

    def compute(self) -> None:
        a, b = (x.values() if isinstance(x, Shared) else x.data for x in (self.a, self.b))
        before = self.before.product.sums if isinstance(self.before, Accumulator) else self.before
        sums = a.float() @ b.float()
        self.sums = Tensor(sums if before is None else sums + before.data, real.float32, self.layout)
        for operand in self.operands:
            operand.memory.note_read(self.owner, operand.span)

    @property
    def layout(self) -> Any:
        before = self.before.product if isinstance(self.before, Accumulator) else self.before
        return getattr(before, "layout", None)


class Accumulator:
    """Stands for the sums of a product that has not been waited for: only another product may take them."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.dtype = real.float32

    def __getattr__(self, name: str) -> Any:
        raise KernelFault(f"{self.product.owner} uses ({name}) the sums of a product before it has waited for them")


class Machine:
    """Runs one program."""

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...], warps: int, seed: int) -> None:
        self.program, self.grid = program, grid
        self.random = random.Random(seed)
        self.agents: dict[int, Any] = {}
        self.allocations: list[Allocation] = []
        self.barriers: dict[tuple[int, int], Barrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.copies: list[Copy] = []
        self.products: list[Product] = []
        self.partitions: list[Partition] = []
        self.error: BaseException | None = None
        self.has_waited = False  # for the kernel before this one
        self.running = self.main = Partition(0, "the program", warps, np.zeros(ENTRIES, np.int64))
        self.agents[0] = self.main

    # -- shared memory and barriers -----------------------------------------------------------------------------------

    def allocate(self, name: str, dtype: Any, shape: list[int], layout: Any, value: Tensor | None = None) -> Shared:
        size = int(np.prod(shape)) * item_bytes(dtype)
        self.allocations.append(Allocation(self, size, name))
        found = Shared(self.allocations[-1], 0, dtype, shape, layout)
        if value is not None:
            found.store(value)
        return found

    def init_barrier(self, at: Shared, count: int) -> None:
        key = id(at.memory), at.start
        if key in self.barriers:
            raise KernelFault(f"{self.barriers[key]} is initialised twice")
        agent = AGENTS + len(self.barriers)
        name = f"{at.memory.name}[{at.start // 8}]"
        self.barriers[key] = self.agents[agent] = Barrier(agent, name, count)

    def barrier(self, at: Shared) -> Barrier:
        found = self.barriers.get((id(at.memory), at.start))
        if found is None:
            raise KernelFault(f"a barrier in {at.memory.name} is used before it is initialised")
        return found

    def arrive(self, barrier: Barrier, count: int = 1, bytes: int = 0) -> None:
        if barrier.missing < count:
            raise KernelFault(f"{self.running} arrives at {barrier}, where all {barrier.count} have arrived")
        self.running.release(barrier.released)
        barrier.bytes += bytes
        barrier.missing -= count
        self.wake(barrier)
        self.yield_baton()

    def wake(self, barrier: Barrier) -> None:
        """Lets those run who waited for a phase, if it is over."""
        if not barrier.completes():
            return
        for partition in self.partitions:
            if partition.woken is barrier:
                raise KernelFault(f"{barrier} ends another phase before {partition} has seen the end of the one before")
            if partition.waits_for == str(barrier):
                partition.waits_for, partition.woken = "", barrier

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.yield_baton()
        if not barrier.has_completed(parity):
            self.block(str(barrier), lambda: barrier.has_completed(parity))
        self.running.woken = None
        self.running.acquire(barrier.clock)

    def join_named(self, number: int, threads: int, stay: bool) -> None:
        """Comes to a named barrier, and stays there until so many threads have come, or goes on."""
        barrier, who = self.named.setdefault(number, NamedBarrier()), self.running
        barrier.threads += 32 * who.warps
        if barrier.threads > threads:
            raise KernelFault(f"{who} is more than the {threads} threads that named barrier {number} expects")
        who.release(barrier.clock)
        if barrier.threads == threads:
            for partition in [*barrier.waiting, *([who] if stay else [])]:
                partition.acquire(barrier.clock)
                partition.waits_for = ""
            self.named[number] = NamedBarrier()
            self.yield_baton()
        elif stay:
            barrier.waiting.append(who)
            self.block(f"named barrier {number}", lambda: self.named[number] is not barrier)
        else:
            self.yield_baton()

    # -- what goes on asynchronously ----------------------------------------------------------------------------------

    def begin_copy(self, source: Any, place: list[int], barrier: Barrier, to: Shared) -> None:
        if list(source.block_shape) != to.shape or source.layout != to.layout or to.dtype != source.dtype:
            raise KernelFault(f"a box {source.block_shape} {source.layout} is copied to {to.shape} {to.layout}")
        to.memory.check_write(self.running, to.span)
        to.memory.check_fenced(self.running, to.span)
        to.memory.note_copy(barrier.agent, barrier.phases + 1, to.span)
        to.memory.bytes[to.start : to.start + to.size] = 0xFF
        self.copies.append(Copy(source, place, barrier, to))

    def land_one(self) -> None:
        copy = self.copies.pop(self.random.randrange(len(self.copies)))
        copy.land()
        self.wake(copy.barrier)

    def begin_product(self, a: Tensor | Shared, b: Shared, before: Any) -> Accumulator:
        product = Product(self.running, a, b, before)
        for operand in product.operands:
            operand.memory.check_read(self.running, operand.span)
            operand.memory.check_fenced(self.running, operand.span)
        if isinstance(before, Accumulator) and before.product.owner is not self.running:
            raise KernelFault(f"{self.running} adds to sums of {before.product.owner}")
        self.products.append(product)
        self.yield_baton()
        return Accumulator(product)

    def wait_for_products(self, most: int, kept: list[Any]) -> list[Any]:
        """Ends the oldest products of this partition until `most` are left; returns what was kept meanwhile."""
        mine = [product for product in self.products if product.owner is self.running]
        for product in mine[: max(len(mine) - most, 0)]:
            if isinstance(product.a, Tensor) and not any(value is product.a for value in kept):
                raise KernelFault(f"{self.running} does not keep the registers that a product reads until it has ended")
            product.compute()
            self.products.remove(product)
        self.yield_baton()
        ended = [isinstance(value, Accumulator) and value.product.sums is not None for value in kept]
        return [value.product.sums if end else value for value, end in zip(kept, ended, strict=True)]

    # -- partitions ---------------------------------------------------------------------------------------------------

    def specialize(self, functions: list[tuple[Callable[..., Any], tuple[Any, ...]]], warps: list[int]) -> None:
        """Runs functions side by side until all have ended."""
        counts = [self.main.warps, *warps]
        for agent, ((function, _), count) in enumerate(zip(functions, counts, strict=True), 1):
            self.partitions.append(Partition(agent, function.__name__, count, self.main.clock))
            self.agents[agent] = self.partitions[-1]
        self.main.clock[0] += 1
        threads = [
            threading.Thread(target=self._run, args=(partition, *function), daemon=True)
            for partition, function in zip(self.partitions, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._pass_baton()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        self.running = self.main
        for partition in self.partitions:
            self.main.acquire(partition.clock)

    def _run(self, partition: Partition, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._take_baton(partition)
            function(*args)
            self.check_products(partition)
            partition.done = True
            self._pass_baton()
        except Stopped:
            pass
        except BaseException as error:
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        self.error = self.error or error
        for partition in self.partitions:
            partition.baton.release()

    def _take_baton(self, partition: Partition) -> None:
        partition.baton.acquire()
        if self.error:
            raise Stopped
        self.running = partition

    def _next(self) -> Partition | None:
        """Returns a partition that can run; copies land only if there is none."""
        while True:
            ready = [partition for partition in self.partitions if not partition.done and not partition.waits_for]
            if ready:
                return self.random.choice(ready)
            left = [partition for partition in self.partitions if not partition.done]
            if not left:
                return None
            if not self.copies:
                raise KernelFault("deadlock: " + "; ".join(f"{who} waits for {who.waits_for}" for who in left))
            self.land_one()

    def _pass_baton(self) -> None:
        following = self._next()
        if following is not None:
            following.baton.release()

    def yield_baton(self) -> None:
        """Lets another partition run, or this one go on."""
        if self.running is self.main:
            return
        me, following = self.running, self._next()
        if following is not me:
            assert following is not None
            following.baton.release()
            self._take_baton(me)

    def block(self, reason: str, ended: Callable[[], bool]) -> None:
        """Waits until something has ended that is not over now."""
        if self.running is not self.main:
            self.running.waits_for = reason
            self.yield_baton()
            return
        while not ended():
            if not self.copies:
                raise KernelFault(f"deadlock: {self.main} waits for {reason}")
            self.land_one()

    def check_products(self, who: Partition) -> None:
        if any(product.owner is who for product in self.products):
            raise KernelFault(f"{who} ends before it has waited for its products")

    def finish(self) -> None:
        """Reports what the program has left undone."""
        self.check_products(self.main)
        if not self.has_waited:
            raise KernelFault("the program ends without having waited for the kernel before it")
        if self.copies:
            raise KernelFault(f"the program ends with {len(self.copies)} copies under way")
        for barrier in self.barriers.values():
            if barrier.bytes:
                raise KernelFault(f"the program ends while {barrier} expects {barrier.bytes} bytes more")
        for number, named in self.named.items():
            if named.threads:
                raise KernelFault(f"the program ends with {named.threads} threads at named barrier {number}")
