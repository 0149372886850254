"""Keeps copies of KV blocks, or of recurrent states, in host memory that the GPU reads and writes by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import Condition, Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

log = logging.getLogger(__name__)
STAGED = 128 << 20  # bytes on the device that blocks pass through, if nobody says how many: whole ones cross the bus
SEGMENT = 256 << 20  # bytes that are pinned at a time
PATIENCE = 5.0  # seconds that a copy waits for its places to be pinned


class PinnedRoom:
    """Implements HostRoom. Blocks lie in many places on the device and in one on the host: they are gathered and
    scattered on the device, as many as `staged` bytes hold but one at least, and cross the bus whole. A thread pins the
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
        self._on_stream = on_stream
        size = sum(self._sizes)
        self.array: NDArray[np.uint8] = np.empty((places, size), np.uint8)
        self._host: Any = torch.from_numpy(self.array)
        self._staged = torch.empty((max(staged // size, 1), size), dtype=torch.uint8, device=parts[0].device)
        self._closing = False
        self._pinned: list[int] = []  # addresses
        self._more = Condition()  # is pinned
        self._thread = Thread(target=self._pin, name="pin KV", daemon=True)
        self._thread.start()

    def copy_out(self, blocks: Sequence[int], places: Sequence[int]) -> float:
        def move(staged: Any, index: Any, some: Sequence[int]) -> None:
            for part, columns in zip(self._parts, staged.split(self._sizes, dim=1), strict=True):
                columns.copy_(part[index])
            for row, place in zip(staged, some, strict=True):
                self._host[place].copy_(row, non_blocking=True)

        return self._timed(move, blocks, places)

    def copy_in(self, blocks: Sequence[int], places: Sequence[int]) -> float:
        def move(staged: Any, index: Any, some: Sequence[int]) -> None:
            for row, place in zip(staged, some, strict=True):
                row.copy_(self._host[place], non_blocking=True)
            for part, columns in zip(self._parts, staged.split(self._sizes, dim=1), strict=True):
                part.index_copy_(0, index, columns)

        return self._timed(move, blocks, places)

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()
        self._host = self._staged = None
        self.array = np.empty((0, 0), np.uint8)

    def _timed(
        self, move: Callable[[Any, Any, Sequence[int]], None], blocks: Sequence[int], places: Sequence[int]
    ) -> float:
        """Moves some blocks at a time, waits for the last of them and returns the device's seconds: steps that were
        launched before do not count."""
        self._wait_for(max(places))
        with self._on_stream():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            index = torch.tensor(blocks, device=self._staged.device)
            for at in range(0, len(blocks), len(self._staged)):
                some = places[at : at + len(self._staged)]
                move(self._staged[: len(some)], index[at : at + len(some)], some)
            ended.record()
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1e3

    def _wait_for(self, place: int) -> None:
        """Waits until a place and all before it are pinned, or nothing more will be."""
        end = (place + 1) * self.array.shape[1]
        with self._more:
            self._more.wait_for(lambda: len(self._pinned) * SEGMENT >= end or not self._thread.is_alive(), PATIENCE)

    def _pin(self) -> None:
        """Has one segment after the other pinned."""
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
