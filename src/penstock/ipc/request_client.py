"""Implements what all engine clients have in common: requests in flight and control messages."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any

from penstock.errors import EngineUnavailable
from penstock.ipc.client import EngineState, ReplicaView
from penstock.ipc.placement import FleetFigures, ReplicaFigures, RequestPlacement
from penstock.ipc.request_stream import EventReader
from penstock.ipc.step_history import StepHistory, StepSample
from penstock.ipc.streams import RequestEngine, RequestStreams
from penstock.types import (
    AdapterInfo,
    AdapterList,
    Event,
    Hello,
    Request,
    Stats,
    WeightState,
)
from penstock.types.messages import Answer, Control, Message, RegisterAdapter, Sleep, UnregisterAdapter, Wake


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

    def cached_tokens(self, request: Request) -> int:
        """Returns 0: what a single engine holds is not known here."""
        return 0

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

    async def ask(self, message: Control[Answer]) -> Answer:
        answer = await self._ask(message)
        assert isinstance(answer, message.answer)
        self._remember(message, answer)
        return answer

    def _remember(self, message: Control[Any], answer: Event) -> None:
        """Keeps what an engine that is started later must be told again."""
        match message, answer:
            case RegisterAdapter(), AdapterList(_, (info,)):
                self.adapters[info.name] = info
            case UnregisterAdapter(name), _:
                self.adapters.pop(name, None)
            case ((Sleep() | Wake()), _):
                self._asleep = isinstance(message, Sleep)
            case _, WeightState():
                self.weights = answer

    def next_id(self) -> int:
        return next(self._ids)

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
    def tell(self, message: Message) -> None:
        """Sends a message to all engines; raises EngineUnavailable if there is none."""

    @abstractmethod
    async def _ask(self, message: Control[Any]) -> Event:
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

    def tell(self, message: Message) -> None:
        self._reachable().send(message)

    async def _ask(self, message: Control[Any]) -> Event:
        return await self._streams.answer(self._reachable(), message._replace(id=self.next_id()))

    @abstractmethod
    def _reachable(self) -> RequestEngine:
        """Returns the engine if messages can be sent to it; raises EngineUnavailable if not."""
