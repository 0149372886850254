"""Keeps one request in flight: what was asked for, what was delivered of its answer, and what its reader has not read
yet. With the first two, another engine can resume it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from penstock.types import Aborted, Event, Finished, Request, Tokens

RESTART = "restart"  # what a report says that a resumed request waited for


class EventMailbox:
    """Queues events for one reader, from one writer, in one thread: it costs a third of asyncio's queue."""

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


class RequestStream:
    """Follows one request through the engines that answer it, one after the other."""

    __slots__ = (
        "_cached",
        "_lost",
        "_mu",
        "_request",
        "_scored",
        "_tokens",
        "_waited",
        "aborting",
        "answered",
        "blamed",
        "box",
        "doubted",
        "sent",
        "settling",
    )

    def __init__(self, request: Request) -> None:
        self._request = request
        self.box = EventMailbox()
        self._tokens: list[int] = []
        self._scored = 0
        self._mu: float | None = None
        self._cached: int | None = None  # as the first engine said
        self._lost: float | None = None  # when the last engine was lost, until the next one answers
        self._waited: float | None = None  # seconds, for other engines; None: it was never resumed
        self.sent = False  # the engine has it
        self.answered = False  # by this engine
        self.settling = False  # it is trusted, since a lost engine had answered it; this one has not yet
        self.doubted = False  # it may be why an engine died, and no engine has answered it since
        self.blamed = 0  # for deaths of which it alone can be the reason, see RequestStreams
        self.aborting = False

    @property
    def id(self) -> int:
        return self._request.id

    @property
    def request(self) -> Request:
        """Returns the request as it is sent to an engine: for what is left of its answer."""
        return self._request if self._waited is None else self.so_far

    @property
    def so_far(self) -> Request:
        """Returns the request with what was delivered of its answer."""
        return self._request._replace(generated=tuple(self._tokens), scored=self._scored, mirostat_mu=self._mu)

    def lose_engine(self, *, doubted: bool) -> None:
        """Notes that the engine is gone, which may be because of this request."""
        self._lost = self._lost or time.monotonic()
        self._waited = self._waited or 0.0
        self.settling = (self.settling or self.answered) and not doubted
        self.doubted = doubted
        self.sent = self.answered = False

    def take(self, events: Sequence[Event]) -> None:
        """Notes what the engine answered and passes it on."""
        for event in events:
            if isinstance(event, Tokens):
                self._note(event)
        self.answered = True
        self.settling = self.doubted = False
        self.box.put([self._told(event) for event in events] if self._waited is not None else list(events))

    def _note(self, event: Tokens) -> None:
        self._tokens += event.tokens
        self._scored += len(event.scores)
        self._mu = event.mirostat_mu
        self.blamed = 0
        if self._cached is None:
            self._cached = event.cached
        if self._lost is not None and self._waited is not None:
            self._waited += time.monotonic() - self._lost
            self._lost = None

    def _told(self, event: Event) -> Event:
        """Returns an event of a resumed request as it is told: what was reused of the prompt is what the first engine
        reused, and the report says for how long there was no engine."""
        if isinstance(event, Tokens):
            return event._replace(cached=self._cached or 0)
        if isinstance(event, Finished | Aborted) and event.report is not None:
            waited = (*event.report.waited, (RESTART, self._waited or 0.0))
            return event._replace(report=event.report._replace(cached=self._cached or 0, waited=waited))
        return event
