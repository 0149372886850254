"""The requests a client has under way, and who waits for the events of each. For one event loop's thread only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

from penstock.engine.loop import Abort, Add, Message
from penstock.types import Event, Failed, Request, Tokens


class Streams:
    def __init__(self) -> None:
        self._queues: dict[int, asyncio.Queue[list[Event]]] = {}

    async def follow(self, request: Request, send: Callable[[Message], None]) -> AsyncGenerator[list[Event], None]:
        """Asks for the request and yields its events, a list per step, to the last; leaving before that aborts it.
        The queue holds what one sequence can produce and no more."""
        send(Add(request))
        queue = self._queues[request.id] = asyncio.Queue()
        try:
            while True:
                events = await queue.get()
                yield events
                if not isinstance(events[-1], Tokens):
                    break
        finally:
            if self._queues.pop(request.id, None) is not None:
                send(Abort(request.id))

    def deliver(self, events: Iterable[Event]) -> None:
        """Hands each request its share of a step. What belongs to a request that was left is dropped."""
        shares: dict[int, list[Event]] = {}
        for event in events:
            shares.setdefault(event.seq, []).append(event)
        for id, share in shares.items():
            queue = self._queues.get(id)
            if queue is None:
                continue
            queue.put_nowait(share)
            if not isinstance(share[-1], Tokens):
                del self._queues[id]

    def fail(self, code: str, message: str) -> None:
        """Ends every request under way."""
        self.deliver([Failed(id, code, message) for id in self._queues])
