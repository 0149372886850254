"""Keeps one request in flight: its journal, by which another engine can resume it, which engine has it, how far that is
trusted with it, and what its reader has not read yet."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.ipc.request_journal import RequestJournal
from penstock.types import Event, Request, Tokens

if TYPE_CHECKING:
    from penstock.ipc.streams import RequestEngine

RESTART = "restart"  # what a report says that a resumed request waited for
GATEWAY = "gateway"  # and one that had to wait for its turn before it was sent to any engine
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
    """Follows one request through the engines that answer it, one after the other, and calls its reader with what they
    say. A reader that fails ends its own request only."""

    __slots__ = (
        "_answers",
        "_journal",
        "_lost",
        "_read",
        "_waited",
        "aborting",
        "blamed",
        "doubted",
        "ended",
        "engine",
        "held",
        "settling",
        "suspected",
        "unexplained",
    )

    def __init__(self, request: Request, read: EventReader) -> None:
        self._journal = RequestJournal(request)
        self._read = read
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # nothing more is read
        self._lost: float | None = None  # when the last engine was lost, until the next one answers
        self._waited: float | None = None  # seconds, for other engines; None: it was never resumed
        self.engine: RequestEngine | None = None  # that has it
        self.held = 0.0  # seconds that it waited for its turn before it was sent to any engine
        self._answers = 0  # deliveries by this engine
        self.settling = False  # it is trusted, since a lost engine had answered it; this one has not yet
        self.unexplained = False  # it waits until it is known why its engine was lost
        self.doubted = False  # it may be why an engine died, and no engine has answered it since
        self.suspected = False  # it was doubted already when its last engine was lost
        self.blamed = 0  # for deaths of which it alone can be the reason, see RequestStreams
        self.aborting = False

    @property
    def id(self) -> int:
        return self._journal.request.id

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
        return self._journal.delivered

    @property
    def resumed(self) -> bool:
        """Returns whether another engine had it before."""
        return self._waited is not None

    @property
    def request(self) -> Request:
        """Returns the request as it is sent to an engine: for what is left of its answer, and of its time."""
        request = self._journal.request if self._waited is None else self.so_far
        return request._replace(claim=request.claim.after(self.held)) if self.held else request

    @property
    def so_far(self) -> Request:
        """Returns the request with what was delivered of its answer."""
        return self._journal.so_far()

    def lose_engine(self) -> None:
        """Notes that the engine is gone. If it had not answered this request, that may be why."""
        self._lost = self._lost or time.monotonic()
        self._waited = self._waited or 0.0
        self.unexplained = not self.answered
        self.settling = self.settling or self.answered
        self.engine = None
        self._answers = 0
        self.suspected, self.doubted = self.doubted, False

    def explain(self, *, doubted: bool) -> None:
        """Notes whether the engine may be gone because of this request. Only an answer ends a doubt that there was
        before."""
        self.unexplained, self.doubted = False, doubted or self.suspected
        self.settling = self.settling and not self.doubted

    def take(self, events: list[Event]) -> None:
        """Notes what the engine answered and passes it on, unless its reader has left."""
        if self.ended.done():
            return
        for event in events:
            if isinstance(event, Tokens):
                self._note(event)
        if self._answers < ANSWERS:
            self._count_answer()
        plain = self._waited is None and not self.held
        told = events if plain else [self._journal.told(event, self._waits) for event in events]
        try:
            if self._read(told):
                self.end()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raises an error of the reader where its request is followed, unless that was left meanwhile."""
        if not self.ended.done():
            unfit = isinstance(error, StopIteration)  # a future takes no such
            self.ended.set_exception(RuntimeError("a reader raised StopIteration") if unfit else error)

    def end(self) -> None:
        """Lets whoever follows it go on: there is nothing more to read."""
        if not self.ended.done():
            self.ended.set_result(None)

    def _count_answer(self) -> None:
        """Counts the first deliveries of this engine, until they show that the request does it no harm."""
        self._answers += 1
        if self.answered:
            self.settling = self.doubted = self.suspected = False
            self.blamed = 0

    def _note(self, event: Tokens) -> None:
        self._journal.note(event)
        if self._lost is not None and self._waited is not None:
            self._waited += time.monotonic() - self._lost
            self._lost = None

    @property
    def _waits(self) -> tuple[tuple[str, float], ...]:
        """Returns for what it waited outside of engines: its turn, and another engine."""
        turn = ((GATEWAY, self.held),) if self.held else ()
        return turn if self._waited is None else (*turn, (RESTART, self._waited))
