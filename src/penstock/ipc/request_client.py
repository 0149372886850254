"""Implements what all engine clients have in common: requests in flight and control messages."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any

from penstock.engine.adapter_messages import AdapterMessage, ListAdapters, RegisterAdapter, UnregisterAdapter
from penstock.engine.carry.messages import Offer
from penstock.engine.loop import ControlMessage, FlushCache, Message, Sleep, Wake
from penstock.engine.weight_messages import (
    AbortAll,
    DescribeWeights,
    Pause,
    Resume,
    UpdateWeights,
    WeightMessage,
)
from penstock.errors import EngineUnavailable
from penstock.ipc.client import EngineState, ReplicaView
from penstock.ipc.placement import FleetFigures, ReplicaFigures, RequestPlacement
from penstock.ipc.request_stream import EventReader
from penstock.ipc.step_history import StepHistory, StepSample
from penstock.ipc.streams import RequestEngine, RequestStreams
from penstock.types import (
    PAUSE_KEEP,
    AdapterInfo,
    AdapterList,
    BlockOffer,
    Event,
    Hello,
    MemoryUse,
    Offered,
    Request,
    Stats,
    WeightState,
)


class RequestClient(ABC):
    """Implements the part of an EngineClient that does not depend on where the engine runs."""

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.state = EngineState.STARTING
        self.restarts = 0
        self.unavailable_reason = "the engine has not been started"
        self._ids = itertools.count(1)
        self._streams = RequestStreams(self)
        self.adapters: dict[str, AdapterInfo] = {}
        self.weights = WeightState()
        self._asleep = False  # the engine was told to sleep, and not to wake since

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        return ()

    @property
    def replica_figures(self) -> Sequence[ReplicaFigures]:
        return ()

    @property
    def fleet_figures(self) -> FleetFigures | None:
        return None

    @property
    def fleet_decisions(self) -> Mapping[str, Mapping[str, int]]:
        return {}

    @property
    def recent_steps(self) -> Sequence[StepSample]:
        return ()

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    @property
    def in_line(self) -> int:
        return 0

    def forget(self, id: int, generated: int) -> None:
        """Does nothing: no request waits for its turn in front of a single engine."""
        return

    def submit(self, request: Request) -> AsyncGenerator[list[Event], None]:
        if self.hello is None:
            raise EngineUnavailable(self.unavailable_reason)
        return self._streams.follow(request)

    def run(self, request: Request, read: EventReader) -> Coroutine[Any, Any, None]:
        if self.hello is None:
            raise EngineUnavailable(self.unavailable_reason)
        return self._streams.run(request, read)

    def note_refused(self, request: Request) -> None:
        """Does nothing: an engine has no use for it."""
        return

    def abort(self, id: int) -> None:
        self._streams.abort(id)

    def when_ended(self, id: int, call: Callable[[], None]) -> None:
        self._streams.endings[id] = call

    def when_placed(self, id: int, call: Callable[[RequestPlacement], None]) -> None:
        self._streams.placings[id] = call

    def end_answers(self, reason: str) -> None:
        self._streams.fail("server_stopping", reason)

    def flush_cache(self) -> None:
        self._tell(FlushCache())

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
        event = await self._ask(message)
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
        event = await self._ask(message)
        assert isinstance(event, AdapterList)
        return event.adapters

    async def _about_memory(self, message: Sleep | Wake) -> MemoryUse:
        event = await self._ask(message)
        assert isinstance(event, MemoryUse)
        return event

    @property
    @abstractmethod
    def stats(self) -> Stats:
        """Returns the latest statistics."""

    @abstractmethod
    def place(self, request: Request, avoid: RequestEngine | None) -> RequestEngine | None:
        """Returns the engine that is to answer a request: see EngineChoice."""

    @abstractmethod
    def quietest(self) -> RequestEngine | None:
        """Returns the engine that a doubted request is tried on."""

    @abstractmethod
    def _tell(self, message: Message) -> None:
        """Sends a message to all engines; raises EngineUnavailable if there is none."""

    @abstractmethod
    async def _ask(self, message: ControlMessage) -> Event:
        """Sends a control message to all engines and returns the answer; raises the error that it is answered with."""


class SingleEngineClient(RequestClient):
    """Implements what clients with one engine have in common."""

    def __init__(self) -> None:
        super().__init__()
        self._stats = Stats()
        self._history = StepHistory()

    @property
    def stats(self) -> Stats:
        return self._stats

    @stats.setter
    def stats(self, stats: Stats) -> None:
        self._history.note(self._stats, stats)
        self._stats = stats

    @property
    def recent_steps(self) -> Sequence[StepSample]:
        return self._history.samples

    @abstractmethod
    def _present(self) -> RequestEngine | None:
        """Returns the engine; None while requests wait for it. Raises EngineUnavailable if there will be none."""

    def place(self, request: Request, avoid: RequestEngine | None) -> RequestEngine | None:
        engine = self._present()
        return None if engine is avoid else engine

    def quietest(self) -> RequestEngine | None:
        return self._present()

    def _tell(self, message: Message) -> None:
        self._reachable().send(message)

    async def _ask(self, message: ControlMessage) -> Event:
        return await self._streams.answer(self._reachable(), message)

    async def offer(self, prompt: Sequence[int], salt: str = "", first: int = 0) -> BlockOffer | None:
        """Has the engine offer what it has of a prompt, from a block on, to another engine. None: it has nothing, or no
        room to keep it."""
        event = await self._ask(Offer(self.next_id(), tuple(prompt), salt, first))
        assert isinstance(event, Offered)
        return event.offer

    @abstractmethod
    def _reachable(self) -> RequestEngine:
        """Returns the engine if messages can be sent to it; raises EngineUnavailable if not."""
