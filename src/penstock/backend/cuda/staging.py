"""Hands out host memory that the device reads later than the host has written it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Event(Protocol):
    """Waits for something on the device, as torch.cuda.Event does."""

    def synchronize(self) -> None: ...


class Staging:
    """Hands out buffers in turn. The host may be any number of steps ahead of the device, so each buffer is handed out
    again only when the copy that last read it has happened."""

    def __init__(self, buffers: Sequence[Any], record: Callable[[], Event | None]) -> None:
        self.turn = 0
        self._buffers = buffers
        self._record = record  # returns an event that happens when all that is queued now has
        self._read: list[Event | None] = [None] * len(buffers)

    def take(self) -> Any:
        """Returns the next buffer, to be written to and then to be queued for reading."""
        self.turn = (self.turn + 1) % len(self._buffers)
        if (event := self._read[self.turn]) is not None:
            event.synchronize()
        return self._buffers[self.turn]

    def queued(self) -> None:
        self._read[self.turn] = self._record()
