"""Keeps one request in flight: the journal from which another engine can resume it, its engine, and how far it is
trusted."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.ipc.request_journal import RequestJournal
from penstock.ipc.trust import Trust, TrustEvent, after
from penstock.types import Event, Request, Tokens

if TYPE_CHECKING:
    from penstock.ipc.dispatch import Dispatch, RequestEngine

RESTART = "restart"  # wait reason of a resumed request
GATEWAY = "gateway"  # wait reason of a request in the gateway's queue
EventReader = Callable[[list[Event]], bool | None]  # takes a step's events; returns True if it wants no more
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
    """Follows one request through the engines that answer it, one after the other, and calls its reader with their
    events. A reader that fails ends its own request only."""

    __slots__ = (
        "_answers",
        "_lost",
        "_read",
        "_waited",
        "aborting",
        "blame",
        "ended",
        "engine",
        "held",
        "journal",
        "promised",
        "pulling",
        "source",
        "trust",
    )

    def __init__(self, request: Request, read: EventReader) -> None:
        self.journal = RequestJournal(request)
        self._read = read
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # nothing more is read
        self._lost: float | None = None  # when the last engine was lost, until the next one answers
        self._waited: float | None = None  # seconds, for other engines; None: it was never resumed
        self._answers = 0  # deliveries by this engine
        self.engine: RequestEngine | None = None  # the engine that has it
        self.source: RequestEngine | None = None  # an engine that it was moved from, with its blocks
        self.pulling: asyncio.Task[None] | None = None  # asks for blocks; the engine gets the request afterwards
        self.promised: int | None = None  # prompt tokens that its engine is believed to hold
        self.held = 0.0  # seconds in the gateway's queue
        self.trust = Trust.NEW
        self.blame = 0  # weight of its deaths, see crashes.py
        self.aborting = False

    @property
    def id(self) -> int:
        return self.journal.request.id

    @property
    def begun(self) -> bool:
        return self._answers > 0

    @property
    def answered(self) -> bool:
        return self.trust is Trust.ANSWERED

    @property
    def generated(self) -> int:
        return self.journal.delivered

    @property
    def resumed(self) -> bool:
        return self._waited is not None

    @property
    def request(self) -> Request:
        """Returns the request as the next engine gets it: for the rest of its answer, and of its time."""
        request = self.journal.request if self._waited is None else self.so_far
        return request._replace(claim=request.claim.after(self.held)) if self.held else request

    @property
    def so_far(self) -> Request:
        return self.journal.so_far()

    def note(self, event: TrustEvent) -> None:
        self.trust = after(self.trust, event)

    def take_place(self, dispatch: Dispatch) -> None:
        self.engine, self.promised, self.source = dispatch.engine, dispatch.promised, None
        self.held = dispatch.waited or self.held

    def stop_pull(self) -> bool:
        pulling, self.pulling = self.pulling, None
        return pulling is not None and pulling.cancel()

    def lose_engine(self) -> None:
        self._lost = self._lost or time.monotonic()
        self._waited = self._waited or 0.0
        self.engine, self._answers = None, 0
        self.note(TrustEvent.LOSS)

    def take(self, events: list[Event]) -> None:
        """Notes the engine's events and passes them on, unless the reader has left."""
        if self.ended.done():
            return
        for event in events:
            if isinstance(event, Tokens):
                self._note(event)
        if self._answers < ANSWERS:
            self._count_answer()
        plain = self._waited is None and not self.held
        told = events if plain else [self.journal.told(event, self._waits) for event in events]
        try:
            if self._read(told):
                self.end()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.ended.done():
            unfit = isinstance(error, StopIteration)  # a future refuses it
            self.ended.set_exception(RuntimeError("a reader raised StopIteration") if unfit else error)

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _count_answer(self) -> None:
        self._answers += 1
        if self._answers == ANSWERS:
            self.note(TrustEvent.ANSWER)
            self.blame = 0

    def _note(self, event: Tokens) -> None:
        self.journal.note(event)
        if self._lost is not None and self._waited is not None:
            self._waited += time.monotonic() - self._lost
            self._lost = None

    @property
    def _waits(self) -> tuple[tuple[str, float], ...]:
        """Returns its waits outside of engines: for its turn, and for another engine."""
        turn = ((GATEWAY, self.held),) if self.held else ()
        return turn if self._waited is None else (*turn, (RESTART, self._waited))
