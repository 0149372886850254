"""Keeps one request in flight: what was asked for, what was delivered of its answer, and what its reader has not read
yet. With the first two, another engine can resume it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.types import Aborted, Event, Finished, Request, Tokens

if TYPE_CHECKING:
    from penstock.ipc.streams import RequestEngine

RESTART = "restart"  # what a report says that a resumed request waited for
GATEWAY = "gateway"  # and one that had to wait for its turn before it was sent to any engine
ANSWERS = 2  # deliveries after which a request is taken as answered: with the first, the fatal step may be under way


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
        "_answers",
        "_cached",
        "_lost",
        "_mu",
        "_request",
        "_scored",
        "_tokens",
        "_waited",
        "aborting",
        "blamed",
        "box",
        "doubted",
        "engine",
        "held",
        "settling",
        "unexplained",
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
        self.engine: RequestEngine | None = None  # that has it
        self.held = 0.0  # seconds that it waited for its turn before it was sent to any engine
        self._answers = 0  # deliveries by this engine
        self.settling = False  # it is trusted, since a lost engine had answered it; this one has not yet
        self.unexplained = False  # it waits until it is known why its engine was lost
        self.doubted = False  # it may be why an engine died, and no engine has answered it since
        self.blamed = 0  # for deaths of which it alone can be the reason, see RequestStreams
        self.aborting = False

    @property
    def id(self) -> int:
        return self._request.id

    @property
    def begun(self) -> bool:
        """Returns whether this engine has delivered anything of the answer."""
        return self._answers > 0

    @property
    def answered(self) -> bool:
        """Returns whether this engine has delivered so much that the request is unlikely to end it."""
        return self._answers >= ANSWERS

    @property
    def generated(self) -> int:
        """Returns how many tokens of its answer were delivered."""
        return len(self._tokens)

    @property
    def resumed(self) -> bool:
        """Returns whether another engine had it before."""
        return self._waited is not None

    @property
    def request(self) -> Request:
        """Returns the request as it is sent to an engine: for what is left of its answer, and of its time."""
        request = self._request if self._waited is None else self.so_far
        return request._replace(claim=request.claim.after(self.held)) if self.held else request

    @property
    def so_far(self) -> Request:
        """Returns the request with what was delivered of its answer."""
        return self._request._replace(generated=tuple(self._tokens), scored=self._scored, mirostat_mu=self._mu)

    def lose_engine(self) -> None:
        """Notes that the engine is gone. If it had not answered this request, that may be why."""
        self._lost = self._lost or time.monotonic()
        self._waited = self._waited or 0.0
        self.unexplained = not self.answered
        self.settling = self.settling or self.answered
        self.engine = None
        self._answers = 0
        self.doubted = False

    def explain(self, *, doubted: bool) -> None:
        """Notes whether the engine may be gone because of this request."""
        self.unexplained, self.doubted = False, doubted
        self.settling = self.settling and not doubted

    def take(self, events: Sequence[Event]) -> None:
        """Notes what the engine answered and passes it on."""
        for event in events:
            if isinstance(event, Tokens):
                self._note(event)
        self._answers += 1
        if self.answered:
            self.settling = self.doubted = False
            self.blamed = 0
        plain = self._waited is None and not self.held
        self.box.put(list(events) if plain else [self._told(event) for event in events])

    def _note(self, event: Tokens) -> None:
        self._tokens += event.tokens
        self._scored += len(event.scores)
        self._mu = event.mirostat_mu
        if self._cached is None:
            self._cached = event.cached
        if self._lost is not None and self._waited is not None:
            self._waited += time.monotonic() - self._lost
            self._lost = None

    def _told(self, event: Event) -> Event:
        """Returns an event of a request that was resumed, or had to wait, as it is told: what was reused of the prompt
        is what the first engine reused, and the report says for how long there was no engine."""
        if isinstance(event, Tokens):
            return event._replace(cached=self._cached or 0)
        if isinstance(event, Finished | Aborted) and event.report is not None:
            waits = (GATEWAY, self.held or None), (RESTART, self._waited)
            waited = (*event.report.waited, *((name, seconds) for name, seconds in waits if seconds is not None))
            cached = event.report.cached if self._cached is None else self._cached
            return event._replace(report=event.report._replace(cached=cached, waited=waited))
        return event
