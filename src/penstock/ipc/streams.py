"""The requests a client has under way, and who waits for the events of each. For one event loop's thread only."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable

from penstock.engine.loop import Abort, Add, Message
from penstock.types import Event, Failed, Request, Tokens


class EventMailbox:
    """One reader, one writer, one thread: a third of the cost of asyncio's queue."""

    __slots__ = ("_reader", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[list[Event]] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, events: list[Event]) -> None:
        self._waiting.append(events)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> list[Event]:
        if not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._waiting.popleft()


class RequestStreams:
    def __init__(self) -> None:
        self._boxes: dict[int, EventMailbox] = {}

    async def follow(self, request: Request, send: Callable[[Message], None]) -> AsyncGenerator[list[Event], None]:
        """Asks for the request and yields its events, a list per step, to the last; leaving before that aborts it.
        The mailbox holds what one sequence can produce and no more."""
        send(Add(request))
        box = self._boxes[request.id] = EventMailbox()
        try:
            while True:
                events = await box.get()
                yield events
                if not isinstance(events[-1], Tokens):
                    break
        finally:
            if self._boxes.pop(request.id, None) is not None:
                send(Abort(request.id))

    def deliver(self, events: Iterable[Event]) -> None:
        """Hands each request its share of a step. What belongs to a request that was left is dropped."""
        shares: dict[int, list[Event]] = {}
        for event in events:
            shares.setdefault(event.seq, []).append(event)
        for id, share in shares.items():
            box = self._boxes.get(id)
            if box is None:
                continue
            box.put(share)
            if not isinstance(share[-1], Tokens):
                del self._boxes[id]

    def fail(self, code: str, message: str) -> None:
        """Ends every request under way."""
        self.deliver([Failed(id, code, message) for id in self._boxes])
