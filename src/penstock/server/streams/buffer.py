"""Keeps the events of a stream by number, so that clients can read them from any event on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from penstock.errors import Gone


@dataclass(slots=True)
class ByteBudget:
    """Counts the bytes of several buffers together."""

    most: float
    used: int = 0


class EventBuffer:
    """Keeps the latest events of one stream: at most `most` bytes and no more than the budget has left, but always the
    last event. Any number of readers may follow it, each at its own pace. For the thread of one event loop only."""

    def __init__(self, most: int, budget: ByteBudget) -> None:
        self.bytes = 0
        self.count = 0  # events that there were, kept or not
        self.ended = False
        self._most = most
        self._budget = budget
        self._events: deque[bytes] = deque()
        self._readers: dict[object, int] = {}  # the number of the event that each reads next
        self._changed = asyncio.Event()

    @property
    def first(self) -> int:
        """Returns the number of the oldest event that is kept."""
        return self.count - len(self._events)

    @property
    def readers(self) -> int:
        return len(self._readers)

    def append(self, event: bytes) -> None:
        """Adds an event, and drops the oldest ones if it does not fit. After the end nothing is added."""
        if self.ended:
            return
        while self._full(len(event)):
            self._drop_oldest()
        self._events.append(event)
        self.count += 1
        self._grow(len(event))
        self._notify()

    async def add(self, event: bytes) -> None:
        """Adds an event when there is room. Events make room once all readers have them. Without readers none does,
        because a client that reconnects may have lost the latest ones."""
        while self._full(len(event)):
            if self._readers and min(self._readers.values()) > self.first:
                self._drop_oldest()
            else:
                await self._changed.wait()
        self.append(event)

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yields the events after the one with this number, as they come, to the last. Raises Gone if the next one is
        no longer kept."""
        reader, at = object(), after + 1
        try:
            while True:
                self._readers[reader] = at
                self.check(at - 1)
                if at < self.count:
                    event = self._events[at - self.first]
                    self._readers[reader] = at = at + 1
                    self._notify()
                    yield event
                elif self.ended:
                    return
                else:
                    await self._changed.wait()
        finally:
            del self._readers[reader]
            self._notify()

    def check(self, after: int) -> None:
        """Raises Gone if the event after the one with this number was dropped."""
        if after + 1 < self.first:
            raise Gone(
                f"the stream's events {after + 1} to {self.first - 1} are no longer kept: read on after event "
                f"{self.first - 1} without them, or send the request again"
            )

    def end(self) -> None:
        """Marks the end: readers leave when they have read all."""
        self.ended = True
        self._notify()

    def clear(self) -> None:
        while self._events:
            self._drop_oldest()

    def _full(self, size: int) -> bool:
        over = self.bytes + size > self._most or self._budget.used + size > self._budget.most
        return over and bool(self._events)

    def _drop_oldest(self) -> None:
        self._grow(-len(self._events.popleft()))

    def _grow(self, size: int) -> None:
        self.bytes += size
        self._budget.used += size

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()
