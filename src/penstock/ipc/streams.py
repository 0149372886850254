"""Keeps the requests that a client has in flight, delivers their events, and has the next engine resume them when one
is lost. For the thread of one event loop only."""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable

from penstock.engine.adapter_messages import AdapterMessage, ListAdapters, RegisterAdapter, UnregisterAdapter
from penstock.engine.loop import Abort, Add, ControlMessage, FlushCache, Message, Sleep, Wake
from penstock.engine.weight_messages import (
    AbortAll,
    DescribeWeights,
    Pause,
    Resume,
    UpdateWeights,
    WeightMessage,
)
from penstock.errors import EngineUnavailable, PoisonedRequest, error_of
from penstock.ipc.client import EngineState
from penstock.ipc.inprocess_engine import by_request
from penstock.ipc.request_stream import EventMailbox, RequestStream
from penstock.types import (
    PAUSE_KEEP,
    Aborted,
    AdapterInfo,
    AdapterList,
    Event,
    Failed,
    Hello,
    MemoryUse,
    Request,
    Stats,
    Tokens,
    WeightState,
)

CRASH, KILL = 2, 1  # how much a request is blamed for a death; a token of it clears it
MOST_BLAMED = 4, 6, 16  # before it fails, after 0, 1 and more unexplained deaths
REMEMBERED = 60.0  # seconds, of an unexplained death
TRIAL = 2.0  # seconds that others wait at most while a doubted request runs
POISONED = 64  # requests that are remembered as the reason of deaths


class RequestStreams:
    """Holds all requests in flight, by id. While it is `held`, there is no engine to send requests to: they wait for
    the next one.

    Engines die because of what they work on, or for no fault of any request. After a death, requests that were worked
    on and that the engine had not answered yet are doubted; if it is only one, it is blamed. The next engine gets a
    blamed request alone. Then it gets those that its predecessor had answered, then the doubted ones, each when the one
    before was answered, and then all others. A request that is blamed for two crashes in a row is poisoned, and fails;
    it takes more if engines are killed, or also die without a request that could be the reason."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.held = False
        self._send = send
        self._streams: dict[int, RequestStream] = {}
        self._answers: dict[int, EventMailbox] = {}  # to control messages
        self.endings: dict[int, Callable[[], None]] = {}  # called when a request has ended, read or not
        self._unsent = 0
        self._recovering = False  # a request is doubted
        self._unexplained: deque[float] = deque(maxlen=2)  # when engines died for which no request was doubted
        self._others_wait = 0.0  # until when, by the monotonic clock, others wait for doubted requests
        self._poisoned: deque[int] = deque(maxlen=POISONED)  # fingerprints

    def __len__(self) -> int:
        return len(self._streams) + len(self._answers)

    async def follow(self, request: Request) -> AsyncGenerator[list[Event], None]:
        """Sends the request and yields its events, a list per step, to the last. Leaving before that aborts it. The
        mailbox is bounded by what one sequence can produce."""
        if self._poisoned and _fingerprint(request) in self._poisoned:
            self.endings.pop(request.id, None)
            yield [_poisoned(request.id, "it was refused at once this time")]
            return
        stream = self._streams[request.id] = RequestStream(request)
        self._unsent += 1
        try:
            if self.held or self._recovering:
                self.dispatch()
            else:
                self._start(stream)
            while True:
                events = await stream.box.get()
                yield events
                if not isinstance(events[-1], Tokens):
                    break
        finally:
            self.endings.pop(request.id, None)
            if self._forget(request.id) and stream.sent:
                self._send(Abort(request.id))

    def abort(self, id: int) -> None:
        """Ends a request; its last event still arrives."""
        stream = self._streams.get(id)
        if stream is None:
            return
        stream.aborting = True
        if stream.sent:
            self._send(Abort(id))
        else:
            self.deliver([Aborted(id)])

    async def answer(self, message: ControlMessage) -> Event:
        """Sends a control message and returns its answer; raises the error that it was answered with."""
        self._send(message)
        box = self._answers[message.id] = EventMailbox()
        try:
            (event,) = await box.get()
        finally:
            self._answers.pop(message.id, None)
        if isinstance(event, Failed):
            raise error_of(event.code, event.message)
        return event

    def deliver(self, events: Iterable[Event]) -> None:
        """Hands each request its share of a step. What belongs to a request that was left is dropped."""
        for id, share in by_request(events).items():
            if (stream := self._streams.get(id)) is not None:
                stream.take(share)
                if not isinstance(share[-1], Tokens):
                    self._forget(id)
                    if id in self.endings:
                        self.endings.pop(id)()
            elif (box := self._answers.get(id)) is not None:
                box.put(share)
        if self._recovering:
            self.dispatch()

    def fail(self, code: str, message: str) -> None:
        """Ends all that is in flight. There will be no other engine."""
        self.held = True  # those that are left when one is forgotten are not sent
        self.deliver([Failed(id, code, message) for id in (*self._streams, *self._answers)])
        self.held = False

    # -- when an engine is lost ----------------------------------------------------------------------------------

    @property
    def requests(self) -> list[Request]:
        """Returns the requests that the engine has, with what was delivered of their answers."""
        return [stream.so_far for stream in self._streams.values() if stream.sent]

    @property
    def with_grammars(self) -> bool:
        """Returns whether a request in flight has a grammar."""
        return any(stream.request.sampling.grammar is not None for stream in self._streams.values())

    @property
    def blamed_twice(self) -> bool:
        """Returns whether a request in flight is blamed for as much as two crashes."""
        return any(stream.blamed >= 2 * CRASH for stream in self._streams.values())

    def lose_engine(self, suspects: Collection[int], reason: str, *, crashed: bool) -> None:
        """Keeps all requests for the next engine. The lost one was working on the `suspects`; if it has not `crashed`,
        it was killed from outside, perhaps for lack of memory. What was blamed too often fails, and so do control
        messages."""
        self.held = True
        lost = [stream for stream in self._streams.values() if stream.sent]
        doubted = [stream for stream in lost if stream.id in suspects and not stream.answered]
        if not doubted and not any(stream.answered for stream in lost):
            doubted = lost  # it died before it could note whom it worked on
        if len(doubted) == 1:
            doubted[0].blamed += CRASH if crashed else KILL
        if lost and not doubted:
            self._unexplained.append(time.monotonic())
        self._unsent += len(lost)
        self._recovering = self._recovering or bool(doubted)
        for stream in lost:
            stream.lose_engine(doubted=stream in doubted)
        self.deliver([Aborted(stream.id) for stream in lost if stream.aborting])
        others = sum(time.monotonic() - when < REMEMBERED for when in self._unexplained)
        self._give_up([stream for stream in doubted if stream.blamed >= MOST_BLAMED[others]], reason)
        for id, box in self._answers.items():
            box.put([Failed(id, "engine_died", f"{reason}: send this again")])

    def _give_up(self, poisoned: list[RequestStream], reason: str) -> None:
        for stream in poisoned:
            self._poisoned.append(_fingerprint(stream.request))
            self.deliver([_poisoned(stream.id, f"the last time, {reason}")])

    def resume(self) -> None:
        """Has an engine that was started continue all requests."""
        self.held = False
        self._let_others_wait()
        self.dispatch()

    def dispatch(self) -> None:
        """Sends the requests that wait for an engine and may run now."""
        if self.held:
            return
        streams = list(self._streams.values())
        doubted = [stream for stream in streams if stream.doubted]
        self._recovering = bool(doubted)
        others_wait = doubted and time.monotonic() < self._others_wait
        if others_wait and (blamed := next((stream for stream in doubted if stream.blamed), None)):
            return None if blamed.sent else self._start(blamed)
        for stream in sorted(streams, key=lambda stream: not stream.settling):
            if not stream.sent and not stream.doubted and (stream.settling or not others_wait):
                self._start(stream)
        busy = any(stream.settling or (stream.doubted and stream.sent) for stream in streams)
        if doubted and not busy:
            self._let_others_wait()
            self._start(doubted[0])

    def _let_others_wait(self) -> None:
        """Lets others wait until a doubted request was answered, or for a moment."""
        self._others_wait = time.monotonic() + TRIAL
        asyncio.get_running_loop().call_later(TRIAL, self.dispatch)

    def _start(self, stream: RequestStream) -> None:
        self._send(Add(stream.request))
        stream.sent = True
        self._unsent -= 1

    def _forget(self, id: int) -> bool:
        """Lets a request go, and lets those run that waited for it; returns whether it was in flight."""
        stream = self._streams.pop(id, None)
        if stream is None:
            return False
        self._unsent -= not stream.sent
        self.dispatch()
        return True


def _fingerprint(request: Request) -> int:
    """Returns a number by which a request is recognized that is sent again."""
    return hash((request.prompt, request.sampling.grammar, request.adapters, request.pooling))


def _poisoned(id: int, what: str) -> Failed:
    message = f"the engine has died again and again when it worked on this request; {what}: do not send it again"
    return Failed(id, PoisonedRequest.code, message)


class RequestClient(ABC):
    """Implements the part of an EngineClient that does not depend on where the engine runs."""

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.state = EngineState.STARTING
        self.stats = Stats()
        self.restarts = 0
        self.unavailable_reason = "the engine has not been started"
        self._ids = itertools.count(1)
        self._streams = RequestStreams(self._send)
        self.adapters: dict[str, AdapterInfo] = {}
        self.weights = WeightState()
        self._asleep = False  # the engine was told to sleep, and not to wake since

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    def submit(self, request: Request) -> AsyncGenerator[list[Event], None]:
        if self.hello is None:
            raise EngineUnavailable(self.unavailable_reason)
        return self._streams.follow(request)

    def abort(self, id: int) -> None:
        self._streams.abort(id)

    def when_ended(self, id: int, call: Callable[[], None]) -> None:
        self._streams.endings[id] = call

    def end_answers(self, reason: str) -> None:
        self._streams.fail("server_stopping", reason)

    def flush_cache(self) -> None:
        self._send(FlushCache())

    async def register_adapter(self, name: str, path: str, scale: float = 1.0, *, replace: bool = False) -> AdapterInfo:
        (info,) = await self._about_adapters(RegisterAdapter(self.next_id(), name, path, scale, replace))
        self.adapters[name] = info
        return info

    async def unregister_adapter(self, name: str) -> AdapterInfo:
        (info,) = await self._about_adapters(UnregisterAdapter(self.next_id(), name))
        self.adapters.pop(name, None)
        return info

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        return await self._about_adapters(ListAdapters(self.next_id()))

    async def pause(self, mode: str = PAUSE_KEEP) -> WeightState:
        return await self._about_weights(Pause(self.next_id(), mode))

    async def resume(self) -> WeightState:
        return await self._about_weights(Resume(self.next_id()))

    async def abort_all(self) -> WeightState:
        return await self._about_weights(AbortAll(self.next_id()))

    async def update_weights(self, path: str, version: str = "", *, recompute: bool = True) -> WeightState:
        return await self._about_weights(UpdateWeights(self.next_id(), path, version, recompute))

    async def describe_weights(self) -> WeightState:
        return await self._about_weights(DescribeWeights(self.next_id()))

    async def _about_weights(self, message: WeightMessage) -> WeightState:
        event = await self._streams.answer(message)
        assert isinstance(event, WeightState)
        self.weights = event
        return event

    async def sleep(self) -> MemoryUse:
        use = await self._about_memory(Sleep(self.next_id()))
        self._asleep = True
        return use

    async def wake(self) -> MemoryUse:
        use = await self._about_memory(Wake(self.next_id()))
        self._asleep = False
        return use

    def next_id(self) -> int:
        return next(self._ids)

    async def _about_adapters(self, message: AdapterMessage) -> tuple[AdapterInfo, ...]:
        event = await self._streams.answer(message)
        assert isinstance(event, AdapterList)
        return event.adapters

    async def _about_memory(self, message: Sleep | Wake) -> MemoryUse:
        event = await self._streams.answer(message)
        assert isinstance(event, MemoryUse)
        return event

    @abstractmethod
    def _send(self, message: Message) -> None:
        """Sends a message to the engine; raises EngineUnavailable if there is none."""
