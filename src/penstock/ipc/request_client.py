"""Implements the common part of all engine clients: requests in flight and control messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any

from penstock.errors import EngineUnavailable
from penstock.ipc.client import EngineState, ReplicaView
from penstock.ipc.dispatch import EngineChoice, OnlyEngine, RequestEngine
from penstock.ipc.placement import FleetFigures, ReplicaFigures, RequestPlacement
from penstock.ipc.request_stream import EventReader
from penstock.ipc.restoring import EngineSettings
from penstock.ipc.step_history import StepHistory, StepSample
from penstock.ipc.streams import RequestStreams
from penstock.types import AdapterInfo, Event, Hello, Request, Stats, WeightState
from penstock.types.messages import Answer, Control, Message


class RequestClient(ABC):
    """Implements the part of an EngineClient that does not depend on where the engine runs."""

    def __init__(self, engines: EngineChoice, settings: EngineSettings) -> None:
        self.hello: Hello | None = None
        self.state = EngineState.STARTING
        self.restarts = 0
        self.unavailable_reason = "the engine has not been started"
        self._streams = RequestStreams(engines)
        self._settings = settings

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        return self._settings.adapters

    @property
    def weights(self) -> WeightState:
        return self._settings.weights

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
    def recent_steps(self) -> Sequence[StepSample]:
        return ()

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    def submit(self, request: Request) -> AsyncGenerator[list[Event], None]:
        if self.hello is None:
            raise EngineUnavailable(self.unavailable_reason)
        return self._streams.follow(request)

    def run(self, request: Request, read: EventReader) -> Coroutine[Any, Any, None]:
        if self.hello is None:
            raise EngineUnavailable(self.unavailable_reason)
        return self._streams.run(request, read)

    def cached_tokens(self, request: Request) -> int:
        return 0

    def note_refused(self, request: Request) -> None:
        """Does nothing: only a fleet grows with its load."""
        return

    def abort(self, id: int) -> None:
        self._streams.abort(id)

    def when_ended(self, id: int, call: Callable[[], None]) -> None:
        self._streams.endings[id] = call

    def when_placed(self, id: int, call: Callable[[RequestPlacement], None]) -> None:
        self._streams.dispatcher.placings[id] = call

    def end_answers(self, reason: str) -> None:
        self._streams.fail("server_stopping", reason)

    async def ask(self, message: Control[Answer]) -> Answer:
        answer = await self._ask(message)
        assert isinstance(answer, message.answer)
        self._remember(message, answer)
        return answer

    def _remember(self, message: Control[Any], answer: Event) -> None:
        self._settings.note(message, answer)

    def next_id(self) -> int:
        return self._streams.next_id()

    def refuse(self, reason: str) -> None:
        self.hello, self.state, self.unavailable_reason = None, EngineState.FAILED, reason
        self._streams.fail("engine_died", reason)

    @property
    @abstractmethod
    def stats(self) -> Stats:
        """Returns the latest statistics."""

    @abstractmethod
    def tell(self, message: Message) -> None:
        """Sends a message to all engines; raises EngineUnavailable if there is none."""

    @abstractmethod
    async def _ask(self, message: Control[Any]) -> Event:
        """Sends a control message to all engines and returns the answer; raises the error that it carries."""


class SingleEngineClient(RequestClient):
    """Implements the common part of clients with one engine."""

    def __init__(self) -> None:
        super().__init__(OnlyEngine(self._present), EngineSettings())
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

    def tell(self, message: Message) -> None:
        self._reachable().send(message)

    async def _ask(self, message: Control[Any]) -> Event:
        return await self._streams.controls.ask(self._reachable(), message._replace(id=self.next_id()))

    @abstractmethod
    def _reachable(self) -> RequestEngine:
        """Returns the engine if messages can be sent to it; raises EngineUnavailable if not."""
