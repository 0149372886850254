"""Keeps the requests that a client has in flight, delivers their events, and has another engine resume them when one
is lost. For the thread of one event loop only."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from penstock.errors import PoisonedRequest, error_of
from penstock.ipc.inprocess_engine import by_request
from penstock.ipc.placement import RequestPlacement
from penstock.ipc.request_stream import EventMailbox, EventReader, RequestStream
from penstock.types import Aborted, Event, Failed, Request, Tokens
from penstock.types.messages import Abort, Add, Control, Message

CRASH, KILL = 2, 1  # how much a request is blamed for a death; an engine that answers it clears it
MOST_BLAMED = 4, 6, 16  # before it fails, after 0, 1 and more unexplained deaths
REMEMBERED = 60.0  # seconds, of an unexplained death
TRIAL = 2.0  # seconds that others wait at most while a doubted request runs
POISONED = 64  # requests that are remembered as the reason of deaths


class RequestEngine(Protocol):
    """Answers requests."""

    def send(self, message: Message) -> None: ...


class EngineChoice(Protocol):
    """Knows the engines of a client."""

    def place(self, request: Request, avoid: RequestEngine | None) -> RequestEngine | None:
        """Returns the engine that is to answer a request, another one than that to avoid. None: the request has to wait
        until `dispatch` is called. Raises EngineUnavailable if there will be no engine."""

    def quietest(self) -> RequestEngine | None:
        """Returns the engine whose death would do the least harm: a doubted request is tried there."""

    @property
    def in_line(self) -> int:
        """Returns how many requests wait for their turn, of those that `place` has returned no engine for. `start` is
        called for them, one after the other."""

    def forget(self, id: int, generated: int) -> None:
        """Takes note that a request has ended, wherever it was, after so many tokens of its answer."""


class StreamObserver(Protocol):
    """Counts what several engines are sent and say."""

    def sent(self, id: int, engine: RequestEngine, *, resumed: bool) -> RequestPlacement:
        """Takes note that an engine is sent a request, and returns why that one."""

    def answered(self, id: int, cached: int) -> None:
        """Takes note of the first tokens that an engine has for a request, of whose prompt it has reused so many."""

    def ended(self, id: int) -> None:
        """Takes note that a request is sent to no engine any more."""


class LostRequests(NamedTuple):
    """Holds the requests of a lost engine that it had not answered. They wait until it is known why it was lost."""

    unanswered: list[RequestStream]
    answered: bool  # it had others, which it had answered
    reason: str  # how it was lost


class RequestStreams:
    """Holds all requests in flight, by id.

    Engines die because of what they work on, or for no fault of any request. After a death, requests that were worked
    on and that the engine had not answered yet are doubted. If it is only one, or only one of them was doubted before,
    that one is blamed. Doubted requests are tried one after the other, each on the quietest engine, once that has
    answered all others; new requests stay away meanwhile, or wait if there is no other engine. Requests that the dead
    engine had answered go on first. A request that is blamed for two crashes in a row is poisoned, and fails; it takes
    more if engines are killed, or also die without a request that could be the reason. So a poisoned request ends two
    engines, or three if others were doubted with it."""

    def __init__(self, engines: EngineChoice) -> None:
        self._engines = engines
        self._streams: dict[int, RequestStream] = {}
        self._answers: dict[int, tuple[RequestEngine, EventMailbox]] = {}  # to control messages
        self.endings: dict[int, Callable[[], None]] = {}  # called when a request has ended, read or not
        self.placings: dict[int, Callable[[RequestPlacement], None]] = {}  # called when one is sent to an engine
        self.observer: StreamObserver | None = None  # of a client with several engines
        self._unsent = 0
        self._recovering = False  # a request is doubted
        self._unexplained: deque[float] = deque(maxlen=2)  # when engines died for which no request was doubted
        self._others_wait = 0.0  # until when, by the monotonic clock, others wait for doubted requests
        self._poisoned: deque[int] = deque(maxlen=POISONED)  # fingerprints

    def __len__(self) -> int:
        return len(self._streams) + len(self._answers)

    async def run(self, request: Request, read: EventReader) -> None:
        """Sends the request and calls `read` with its events, a list per step, at the moment when they arrive: no task
        is woken up for a token. Returns after the last one, or when `read` wants no more; raises what `read` raises.
        Leaving before the last event aborts the request."""
        with self._sent(request, read) as stream:
            await stream.ended

    async def follow(self, request: Request) -> AsyncGenerator[list[Event], None]:
        """Does what `run` does for a reader that takes its time: yields the events. The mailbox is bounded by what one
        sequence can produce."""
        box = EventMailbox()
        with self._sent(request, box.put):
            while True:
                events = await box.get()
                yield events
                if not isinstance(events[-1], Tokens):
                    break

    @contextmanager
    def _sent(self, request: Request, read: EventReader) -> Iterator[RequestStream]:
        """Has a request in flight while the block runs."""
        stream = RequestStream(request, read)
        try:
            if self._poisoned and _fingerprint(request) in self._poisoned:
                self._hand_over(stream, [_poisoned(request.id, "it was refused at once this time")])
            else:
                self._streams[request.id] = stream
                self._unsent += 1
                if self._recovering:
                    self.dispatch()
                else:
                    self._start(stream, None)
            yield stream
        finally:
            self._drop_calls(request.id)
            if self._forget(request.id) and stream.engine is not None:
                stream.engine.send(Abort(request.id))

    def _drop_calls(self, id: int) -> None:
        self.endings.pop(id, None)
        self.placings.pop(id, None)
        if self.observer is not None:
            self.observer.ended(id)

    def abort(self, id: int) -> None:
        """Ends a request; its last event still arrives."""
        stream = self._streams.get(id)
        if stream is None:
            return
        stream.aborting = True
        if stream.engine is not None:
            stream.engine.send(Abort(id))
        else:
            self.end([Aborted(id)])

    async def answer(self, engine: RequestEngine, message: Control[Any]) -> Event:
        """Sends a control message and returns its answer; raises the error that it was answered with. No two messages
        have the same id."""
        engine.send(message)
        box = EventMailbox()
        self._answers[message.id] = engine, box
        try:
            (event,) = await box.get()
        finally:
            self._answers.pop(message.id, None)
        if isinstance(event, Failed):
            raise error_of(event.code, event.message)
        return event

    def deliver(self, engine: RequestEngine, events: Iterable[Event]) -> None:
        """Hands each request its share of a step of its engine. What belongs to a request that was left, or that
        another engine has now, is dropped."""
        for id, share in by_request(events).items():
            if (stream := self._streams.get(id)) is not None:
                if stream.engine is engine:
                    self._hand_over(stream, share)
            elif (asked := self._answers.get(id)) is not None and asked[0] is engine:
                asked[1].put(share)
        if self._recovering:
            self.dispatch()

    def fail(self, code: str, message: str) -> None:
        """Ends all that is in flight. There will be no other engine; one that there still is computes nothing more for
        it."""
        streams, self._streams = self._streams, {}  # those that are left when one is forgotten are not sent
        self._unsent = 0
        for id, stream in streams.items():
            self._engines.forget(id, stream.generated)
            if stream.engine is not None:
                stream.engine.send(Abort(id))
        for id, stream in streams.items():
            self._hand_over(stream, [Failed(id, code, message)])
        for id, (_, box) in self._answers.items():
            box.put([Failed(id, code, message)])

    def end(self, events: Iterable[Event]) -> None:
        """Ends requests with events that are no engine's."""
        for event in events:
            if (stream := self._streams.get(event.seq)) is not None:
                self._hand_over(stream, [event])

    def _hand_over(self, stream: RequestStream, share: list[Event]) -> None:
        if self.observer is not None and not stream.begun and isinstance(first := share[0], Tokens):
            self.observer.answered(stream.id, first.cached)
        stream.take(share)
        if not isinstance(share[-1], Tokens):
            self._forget(stream.id)
            if stream.id in self.endings:
                self.endings.pop(stream.id)()
            stream.end()

    # -- when an engine is lost ----------------------------------------------------------------------------------

    @property
    def requests(self) -> list[Request]:
        """Returns the requests that engines have, with what was delivered of their answers."""
        return [stream.so_far for stream in self._streams.values() if stream.engine is not None]

    def load(self, engine: RequestEngine) -> tuple[int, int]:
        """Returns how many requests an engine has not answered yet, and how many it has in all."""
        answered = [stream.answered for stream in self._streams.values() if stream.engine is engine]
        return answered.count(False), len(answered)

    @property
    def with_grammars(self) -> bool:
        """Returns whether a request in flight has a grammar."""
        return any(stream.request.sampling.grammar is not None for stream in self._streams.values())

    @property
    def blamed_twice(self) -> bool:
        """Returns whether a request in flight is blamed for as much as two crashes."""
        return any(stream.blamed >= 2 * CRASH for stream in self._streams.values())

    def lose(self, engine: RequestEngine, reason: str) -> LostRequests:
        """Keeps the requests of a lost engine for others, and fails the control messages that it was sent. Those that
        it had answered can go on; those that it had not wait for `blame` or `trust`."""
        lost = [stream for stream in self._streams.values() if stream.engine is engine]
        unanswered = [stream for stream in lost if not stream.answered]
        self._unsent += len(lost)
        for stream in lost:
            stream.lose_engine()
        self.end([Aborted(stream.id) for stream in lost if stream.aborting])
        for id, (asked, box) in self._answers.items():
            if asked is engine:
                box.put([Failed(id, "engine_died", f"{reason}: send this again")])
        return LostRequests(unanswered, len(unanswered) < len(lost), reason)

    def move(self, engine: RequestEngine) -> None:
        """Has other engines go on with all requests of one that still answers. It must not be sent others."""
        for stream in self._streams.values():
            if stream.engine is engine:
                engine.send(Abort(stream.id))
                stream.lose_engine()
                self._explain([stream])
                self._unsent += 1
        self.dispatch()

    def trust(self, lost: LostRequests) -> None:
        """Lets requests go on whose engine was not lost because of any of them."""
        self._explain(self._left(lost))

    def blame(
        self, lost: LostRequests, suspects: Collection[int] | None, *, crashed: bool, shared: bool = False
    ) -> None:
        """Doubts those of an engine's requests that it was working on when it died: the `suspects`, or all if nobody
        knows. If it has not `crashed`, it was killed from outside, perhaps for lack of memory. If suspicion is `shared`
        with requests of other clients, none is blamed that was not doubted before. What was blamed too often fails."""
        left = self._left(lost)
        doubted = left if suspects is None else [stream for stream in left if stream.id in suspects]
        if not doubted and (not lost.answered or (crashed and not suspects and self._unexplained_deaths)):
            doubted = left  # it died before it could note whom it worked on, or does so again and again
        if suspects is not None:
            _accuse(doubted, crashed, shared)
        if not doubted and (left or lost.answered):
            self._unexplained.append(time.monotonic())
        poisoned = self._poisoned_among(doubted)
        self._explain(left, () if poisoned else doubted)  # the reason is found: others that were there are trusted
        self._give_up(poisoned, lost.reason)

    def blame_late(self, lost: LostRequests, suspects: Collection[int], *, crashed: bool) -> None:
        """Blames one of the requests of an engine whose death nobody could explain in time, if no other can be the
        reason. By now it may be tried on another engine, or have ended that one too; if one has answered it, it is
        not blamed."""
        left = [stream for stream in self._left(lost) if stream.doubted or stream.suspected]
        doubted = [stream for stream in left if stream.id in suspects]
        if len(doubted) == 1:
            doubted[0].blamed += CRASH if crashed else KILL
        self._give_up(self._poisoned_among(doubted), lost.reason)

    def _left(self, lost: LostRequests) -> list[RequestStream]:
        """Returns those that have not ended meanwhile."""
        return [stream for stream in lost.unanswered if stream.id in self._streams]

    def _explain(self, lost: list[RequestStream], doubted: Collection[RequestStream] = ()) -> None:
        """Lets requests of a lost engine go on; those that are doubted are tried before."""
        for stream in lost:
            stream.explain(doubted=stream in doubted)
        if any(stream.doubted for stream in lost):
            self._recovering = True
            self._let_others_wait()

    def _poisoned_among(self, doubted: list[RequestStream]) -> list[RequestStream]:
        """Returns the requests that were blamed too often."""
        most = MOST_BLAMED[self._unexplained_deaths]
        return [stream for stream in doubted if stream.blamed >= most]

    @property
    def _unexplained_deaths(self) -> int:
        """Returns how many engines died lately with no request in doubt."""
        return sum(time.monotonic() - when < REMEMBERED for when in self._unexplained)

    def _give_up(self, poisoned: list[RequestStream], reason: str) -> None:
        for stream in poisoned:
            if stream.engine is not None:
                stream.engine.send(Abort(stream.id))
            self._poisoned.append(_fingerprint(stream.request))
            self.end([_poisoned(stream.id, f"the last time, {reason}")])

    # -- sending -------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Has an engine that was started continue the requests that wait."""
        if self._recovering:
            self._let_others_wait()
        self.dispatch()

    @property
    def reserved(self) -> RequestEngine | None:
        """Returns the engine that new requests stay away from now."""
        return self._reserved([each for each in self._streams.values() if each.doubted]) if self._recovering else None

    def start(self, id: int, waited: float) -> bool:
        """Sends a request whose turn has come after so many seconds; returns whether it could be."""
        if (stream := self._streams.get(id)) is None:
            return True
        stream.held = waited
        self._start(stream, self.reserved)
        return stream.engine is not None

    def dispatch(self) -> None:
        """Sends the requests that wait for an engine and may run now."""
        if self._unsent <= self._engines.in_line and not self._recovering:
            return
        streams = list(self._streams.values())
        doubted = [stream for stream in streams if stream.doubted]
        self._recovering = bool(doubted)
        reserved = self._reserved(doubted)
        blamed = next((stream for stream in doubted if stream.blamed), None) if reserved is not None else None
        if blamed is not None and reserved is not None and blamed.engine is None and not self.load(reserved)[0]:
            self._send(blamed, reserved)
        for stream in sorted(streams, key=lambda stream: not stream.settling):
            if stream.engine is None and not stream.doubted and not stream.unexplained:
                self._start(stream, reserved)
                if stream.engine is None and stream.settling and blamed is None:
                    self._start(stream, None)
        if doubted and blamed is None:
            self._try_next(doubted, streams, alone=reserved is not None)

    def _reserved(self, doubted: list[RequestStream]) -> RequestEngine | None:
        """Returns the engine that new requests stay away from: the one that a doubted request is tried on."""
        if not doubted or time.monotonic() >= self._others_wait:
            return None
        tried = (stream.engine for stream in doubted if stream.engine is not None)
        return next(tried, None) or self._engines.quietest()

    def _try_next(self, doubted: list[RequestStream], streams: list[RequestStream], *, alone: bool) -> None:
        """Tries the next doubted request, unless one is being tried or its engine still has to resume others. To try it
        `alone`, it waits until the engine has answered all others: they would be doubted with it."""
        engine = self._engines.quietest()
        if engine is None or any(stream.engine is not None for stream in doubted):
            return
        unanswered = [stream for stream in streams if stream.engine is engine and not stream.answered]
        if not any(alone or stream.settling for stream in unanswered):
            self._let_others_wait()
            self._send(doubted[0], engine)

    def _let_others_wait(self) -> None:
        """Lets others wait until a doubted request was answered, or for a moment."""
        self._others_wait = time.monotonic() + TRIAL
        asyncio.get_running_loop().call_later(TRIAL, self.dispatch)

    def _start(self, stream: RequestStream, avoid: RequestEngine | None) -> None:
        """Sends a request to the engine that suits it, if there is one now."""
        engine = self._engines.place(stream.request, avoid)
        if engine is not None:
            self._send(stream, engine)

    def _send(self, stream: RequestStream, engine: RequestEngine) -> None:
        engine.send(Add(stream.request))
        stream.engine = engine
        self._unsent -= 1
        if self.observer is not None:
            placement = self.observer.sent(stream.id, engine, resumed=stream.resumed)
            if (call := self.placings.get(stream.id)) is not None:
                call(placement)

    def _forget(self, id: int) -> bool:
        """Lets a request go, and lets those run that waited for it; returns whether it was in flight."""
        stream = self._streams.pop(id, None)
        if stream is None:
            return False
        self._unsent -= stream.engine is None
        self._engines.forget(id, stream.generated)
        self.dispatch()
        return True


def _accuse(doubted: list[RequestStream], crashed: bool, shared: bool) -> None:
    """Blames the one of several doubted requests that alone can be the reason, or that was doubted before: one is tried
    at a time, and others have only come to its engine since."""
    known = [stream for stream in doubted if stream.suspected] or ([] if shared else doubted)
    if len(known) == 1:
        known[0].blamed += CRASH if crashed else KILL


def _fingerprint(request: Request) -> int:
    """Returns a number by which a request is recognized that is sent again."""
    return hash((request.prompt, request.sampling.grammar, request.adapters, request.pooling))


def _poisoned(id: int, what: str) -> Failed:
    message = f"the engine has died again and again when it worked on this request; {what}: do not send it again"
    return Failed(id, PoisonedRequest.code, message)
