"""Holds a GPU and its streams. Device "cpu" has none of them: there Triton's interpreter runs, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from penstock.backend.cuda.flight import SampledTokens
from penstock.backend.cuda.lost_device import cannot_go_on
from penstock.errors import OutOfMemory

NO_MEMORY = 32 << 20  # below this, any error of the driver counts as a shortage
INTERPRETER_MEMORY = 1 << 30  # bytes that tests plan with


class MemoryOfGpu(NamedTuple):
    """States a device's memory in bytes."""

    free: int
    total: int


class Gpu:
    """Queues steps on one stream, and copies of answers on another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._answering: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.stream is not None else nullcontext()

    def event(self) -> Any | None:
        """Returns an event that happens after all steps queued so far."""
        return self.stream.record_event() if self.stream is not None else None

    def fetch(self, sampled: SampledTokens | None, count: int) -> tuple[Any, Any | None]:
        """Queues the copy of sampled tokens to the host. The next step need not wait for it."""
        event = self.event()
        if sampled is None:
            return None, event
        if event is None:
            return sampled.fetch(count), None
        with torch.cuda.stream(self._answering):
            self._answering.wait_event(event)
            return sampled.fetch(count), self._answering.record_event()

    def synchronize(self) -> None:
        if self.stream is not None:
            torch.cuda.synchronize(self.device)

    def memory(self) -> MemoryOfGpu:
        if self.stream is None:
            return MemoryOfGpu(INTERPRETER_MEMORY, INTERPRETER_MEMORY)
        return MemoryOfGpu(*map(int, torch.cuda.mem_get_info(self.device)))

    def release_cached(self) -> None:
        if self.stream is not None:
            with self.on_device():
                torch.cuda.empty_cache()

    def is_lost(self) -> bool:
        return self.stream is not None and cannot_go_on(partial(torch.cuda.synchronize, self.device))

    @contextmanager
    def reserving(self, what: str) -> Iterator[None]:
        with self.on_device(), self.shortage(what):
            yield

    @contextmanager
    def shortage(self, what: str) -> Iterator[None]:
        """Raises OutOfMemory for an error that a shortage of memory explains."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, torch.cuda.OutOfMemoryError) and not self._is_full():
                raise
            raise OutOfMemory(f"the device has no memory for {what}: {str(error).splitlines()[0]}") from error

    def _is_full(self) -> bool:
        return self.stream is not None and self.memory().free < NO_MEMORY
