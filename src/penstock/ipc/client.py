"""Defines how the server and the Python API use an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from penstock.ipc.placement import FleetFigures, ReplicaFigures, RequestPlacement
from penstock.ipc.request_stream import EventReader
from penstock.ipc.step_history import StepSample
from penstock.types import AdapterInfo, Event, Hello, Request, Stats, WeightState
from penstock.types.messages import Answer, Control, Message


class EngineState(StrEnum):
    """Says whether requests are answered."""

    STARTING = "starting"  # it has not started yet
    READY = "ready"
    RESUMING = "resuming"  # the engine was lost; requests wait for the next one, which is being started
    FAILED = "failed"  # the engine is gone, and requests are refused


class ReplicaView(Protocol):
    """Shows one of several engines that share the requests of a client."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int:
        """Returns the id of the engine process; 0: there is none now."""

    @property
    def state(self) -> StrEnum: ...

    @property
    def epoch(self) -> int:
        """Returns a number that another engine process does not have."""

    @property
    def reason(self) -> str:
        """Returns why it cannot be used now; empty: it can, or nothing is known."""


class EngineClient(Protocol):
    """Implemented by ipc/inprocess.py (a thread), ipc/spawn.py (a process that is restarted when it dies) and
    fleet/client.py (many processes on many machines)."""

    @property
    def hello(self) -> Hello | None:
        """Returns the engine's hello; None while requests are refused. While they wait for a restart, it is the last
        engine's."""

    @property
    def state(self) -> EngineState:
        """Returns whether requests are answered now."""

    @property
    def unavailable_reason(self) -> str:
        """Returns why requests are refused or wait, while the state is not ready."""

    @property
    def restarts(self) -> int: ...

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """Returns the engines of a fleet; none: there is one engine, and its hello describes it."""

    @property
    def replica_figures(self) -> Sequence[ReplicaFigures]:
        """Returns figures of the engines of a fleet; none: there is one engine, and `stats` are its own."""

    @property
    def fleet_figures(self) -> FleetFigures | None:
        """Returns figures of a fleet as a whole; None: there is one engine."""

    @property
    def in_flight(self) -> int:
        """Returns how many requests have not had their last event."""

    @property
    def stats(self) -> Stats:
        """Returns the engine's latest statistics. They arrive after every step and every message."""

    @property
    def recent_steps(self) -> Sequence[StepSample]:
        """Returns the engine's last steps, the oldest first; none: there are several engines."""

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Returns the adapters that requests may name, by name."""

    async def start(self, *, yielding: bool = False) -> Hello:
        """Starts the engine. With `yielding`, an engine process loads its weights only as fast as that slows down no
        other one."""

    def submit(self, request: Request) -> AsyncGenerator[list[Event], None]:
        """Yields the events of one request, a list per step, up to Finished, Aborted or Failed. Leaving the generator
        early aborts the request. Raises EngineUnavailable without an engine."""

    def run(self, request: Request, read: EventReader) -> Coroutine[Any, Any, None]:
        """Calls `read` with the events of each step of one request as they arrive, up to Finished, Aborted or Failed,
        or until it returns True; an error of `read` is raised here. Cancelling this aborts the request. No task wakes
        up for a step, unlike with `submit`, so `read` must be quick. Raises EngineUnavailable without an engine."""

    def cached_tokens(self, request: Request) -> int:
        """Returns how many leading tokens of a prompt an engine is known to hold; 0: that is not known."""

    def note_refused(self, request: Request) -> None:
        """Counts a request that is not submitted because it would wait too long: a fleet may grow for it."""

    def abort(self, id: int) -> None:
        """Ends a request now; its last event still arrives, with a report of what happened to it."""

    def when_ended(self, id: int, call: Callable[[], None]) -> None:
        """Registers a call for the end of a request that is about to be submitted, even if nobody reads its events. It
        is not called for a request that was left."""

    def when_placed(self, id: int, call: Callable[[RequestPlacement], None]) -> None:
        """Registers a call for each engine that gets a request which is about to be submitted: the first, and any that
        resumes it."""

    def end_answers(self, reason: str) -> None:
        """Ends every request in flight with an error, because the server stops."""

    def tell(self, message: Message) -> None:
        """Sends a message without an answer."""

    async def ask(self, message: Control[Answer]) -> Answer:
        """Sends a control message (engine/messages.py lists them) and returns the engine's answer; raises the error
        that refuses it."""

    @property
    def weights(self) -> WeightState:
        """Returns which weights are loaded and whether there is a pause, as the engine said last."""

    def next_id(self) -> int: ...

    async def close(self) -> None: ...
