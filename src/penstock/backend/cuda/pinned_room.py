"""Keeps copies of KV blocks, or of recurrent states, in host memory that the GPU reads and writes by itself.

A block lies in many places on the device and in one on the host. On the stream of steps, blocks are gathered into a
buffer on the device or scattered from one. Between buffer and host they cross the bus whole, on another stream, so that
later steps run meanwhile. Those steps wait for blocks that come in, and for a buffer only if all are in use.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import Condition, Thread
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backend.base import CopyTiming

log = logging.getLogger(__name__)
STAGED = 128 << 20  # default bytes of the buffers on the device
BUFFERS = 2  # one is filled while the other crosses the bus
SEGMENT = 64 << 20  # bytes that are pinned at a time
PAUSE = 0.001  # seconds between two of them, in which others get the driver's lock
PATIENCE = 5.0  # seconds that a copy waits for its places to be pinned


class TransitBuffer:
    """Holds rows of bytes that are on their way. What uses it next, on any stream, waits for what used it last."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self._used: Any | None = None  # an event

    def take(self, stream: Any) -> None:
        if self._used is not None:
            stream.wait_event(self._used)

    def leave(self, stream: Any) -> None:
        self._used = stream.record_event()

    def finish(self) -> None:
        if self._used is not None:
            self._used.synchronize()


class Crossing(NamedTuple):
    """Is the way of some blocks across the bus, between two events."""

    direction: str
    blocks: int
    began: Any
    ended: Any


class PinnedRoom:
    """Implements HostRoom. The buffers hold `staged` bytes together, but one block each at least. A thread pins the
    memory, which takes a second for several GB; copies wait until it has come to their places."""

    def __init__(
        self,
        parts: Sequence[Any],
        places: int,
        on_stream: Callable[[], AbstractContextManager[Any]],
        staged: int = STAGED,
    ) -> None:
        self._parts = parts  # [blocks, bytes] each
        self._sizes = [part.shape[1] for part in parts]
        self._device = parts[0].device
        self._on_stream = on_stream  # the stream of steps
        self._bus = torch.cuda.Stream(self._device)
        size = sum(self._sizes)
        self.array: NDArray[np.uint8] = np.empty((places, size), np.uint8)
        self._host: Any = torch.from_numpy(self.array)
        self._most = max(staged // BUFFERS // size, 1)  # blocks in a buffer
        shape = {"size": (self._most, size), "dtype": torch.uint8, "device": self._device}
        self._buffers = deque(TransitBuffer(torch.empty(**shape)) for _ in range(BUFFERS))  # the next one first
        self._crossings: deque[Crossing] = deque()  # not reported yet
        self._closing = False
        self._pinned: list[int] = []  # addresses
        self._more = Condition()  # is pinned, or nothing more will be
        self._pins = True
        self._thread = Thread(target=self._pin, name="pin KV", daemon=True)
        self._thread.start()

    def copy_out(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        with self._on_stream():
            steps = torch.cuda.current_stream(self._device)
            for buffer, index, some in self._passes(blocks, places):
                rows = buffer.rows[: len(some)]
                buffer.take(steps)
                for part, columns in zip(self._parts, rows.split(self._sizes, dim=1), strict=True):
                    columns.copy_(part[index])
                self._bus.wait_event(steps.record_event())
                self._cross("out", [(self._host[place], row) for place, row in zip(some, rows, strict=True)])
                buffer.leave(self._bus)

    def copy_in(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        with self._on_stream():
            steps = torch.cuda.current_stream(self._device)
            for buffer, index, some in self._passes(blocks, places):
                rows = buffer.rows[: len(some)]
                buffer.take(self._bus)
                self._cross("in", [(row, self._host[place]) for place, row in zip(some, rows, strict=True)])
                steps.wait_event(self._bus.record_event())
                for part, columns in zip(self._parts, rows.split(self._sizes, dim=1), strict=True):
                    part.index_copy_(0, index, columns)
                buffer.leave(steps)

    def finish(self) -> None:
        self._bus.synchronize()

    def timings(self) -> list[CopyTiming]:
        timed = []
        while self._crossings and self._crossings[0].ended.query():
            direction, blocks, began, ended = self._crossings.popleft()
            timed.append(CopyTiming(direction, blocks, float(began.elapsed_time(ended)) / 1e3))
        return timed

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self.finish()
        for buffer in self._buffers:
            buffer.finish()
        with torch.cuda.device(self._device):
            for address in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()
        self._buffers.clear()
        self._host = None
        self.array = np.empty((0, 0), np.uint8)

    def _passes(self, blocks: Sequence[int], places: Sequence[int]) -> Any:
        self._wait_for(max(places))
        index = torch.tensor(blocks).pin_memory().to(self._device, non_blocking=True)  # else it waits for steps
        for at in range(0, len(blocks), self._most):
            some = places[at : at + self._most]
            self._buffers.rotate(-1)
            yield self._buffers[-1], index[at : at + len(some)], some

    def _cross(self, direction: str, copies: Sequence[tuple[Any, Any]]) -> None:
        """Queues the copy of rows (target, source) over the bus, after all that its stream waits for, and times it."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._bus):
            began.record()
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            ended.record()
        self._crossings.append(Crossing(direction, len(copies), began, ended))

    def _wait_for(self, place: int) -> None:
        """Waits until a place and all before it are pinned, or nothing more will be."""
        end = (place + 1) * self.array.shape[1]
        with self._more:
            self._more.wait_for(lambda: len(self._pinned) * SEGMENT >= end or not self._pins, PATIENCE)

    def _pin(self) -> None:
        try:
            with torch.cuda.device(self._device):  # a thread begins with the first GPU, and would take memory there
                self._pin_segments()
        finally:
            with self._more:
                self._pins = False
                self._more.notify_all()

    def _pin_segments(self) -> None:
        first, total = self.array.ctypes.data, self.array.nbytes
        for at in range(0, total, SEGMENT):
            if self._closing:
                return
            error = int(torch.cuda.cudart().cudaHostRegister(first + at, min(SEGMENT, total - at), 0))
            if error:
                log.warning("KV in host memory is slow beyond %d bytes, which could not be pinned: error %d", at, error)
                return
            with self._more:
                self._pinned.append(first + at)
                self._more.notify_all()
            time.sleep(PAUSE)
