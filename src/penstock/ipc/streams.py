"""Keeps the requests that a client has in flight, and delivers their events. For the thread of one event loop only."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable

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
from penstock.errors import EngineUnavailable, error_of
from penstock.ipc.inprocess_engine import by_request
from penstock.types import (
    PAUSE_KEEP,
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


class RequestStreams:
    """Holds the mailboxes of all requests in flight, by id."""

    def __init__(self) -> None:
        self._boxes: dict[int, EventMailbox] = {}
        self.endings: dict[int, Callable[[], None]] = {}  # called when a request has ended, read or not

    def __len__(self) -> int:
        return len(self._boxes)

    async def follow(self, request: Request, send: Callable[[Message], None]) -> AsyncGenerator[list[Event], None]:
        """Sends the request and yields its events, a list per step, to the last. Leaving before that aborts it. The
        mailbox is bounded by what one sequence can produce."""
        send(Add(request))
        box = self._boxes[request.id] = EventMailbox()
        try:
            while True:
                events = await box.get()
                yield events
                if not isinstance(events[-1], Tokens):
                    break
        finally:
            self.endings.pop(request.id, None)
            if self._boxes.pop(request.id, None) is not None:
                send(Abort(request.id))

    async def answer(self, message: ControlMessage, send: Callable[[Message], None]) -> Event:
        """Sends a control message and returns its answer; raises the error that it was answered with."""
        send(message)
        box = self._boxes[message.id] = EventMailbox()
        try:
            (event,) = await box.get()
        finally:
            self._boxes.pop(message.id, None)
        if isinstance(event, Failed):
            raise error_of(event.code, event.message)
        return event

    def deliver(self, events: Iterable[Event]) -> None:
        """Hands each request its share of a step. What belongs to a request that was left is dropped."""
        for id, share in by_request(events).items():
            box = self._boxes.get(id)
            if box is None:
                continue
            box.put(share)
            if not isinstance(share[-1], Tokens):
                del self._boxes[id]
                if id in self.endings:
                    self.endings.pop(id)()

    def fail(self, code: str, message: str) -> None:
        """Ends every request in flight."""
        self.deliver([Failed(id, code, message) for id in self._boxes])


class RequestClient(ABC):
    """Implements the part of an EngineClient that does not depend on where the engine runs."""

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.stats = Stats()
        self.restarts = 0
        self.unavailable_reason = "the engine has not been started"
        self._ids = itertools.count(1)
        self._streams = RequestStreams()
        self.adapters: dict[str, AdapterInfo] = {}
        self.weights = WeightState()
        self._asleep = False  # the engine was told to sleep, and not to wake since

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    def submit(self, request: Request) -> AsyncGenerator[list[Event], None]:
        if self.hello is None:
            raise EngineUnavailable(self.unavailable_reason)
        return self._streams.follow(request, self._send)

    def abort(self, id: int) -> None:
        self._send(Abort(id))

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
        event = await self._streams.answer(message, self._send)
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
        event = await self._streams.answer(message, self._send)
        assert isinstance(event, AdapterList)
        return event.adapters

    async def _about_memory(self, message: Sleep | Wake) -> MemoryUse:
        event = await self._streams.answer(message, self._send)
        assert isinstance(event, MemoryUse)
        return event

    @abstractmethod
    def _send(self, message: Message) -> None:
        """Sends a message to the engine; raises EngineUnavailable if there is none."""
