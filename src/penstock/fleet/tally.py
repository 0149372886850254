"""Counts what each replica of a gateway was sent and what became of it, and says in words where requests go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.fleet.replica import Replica
from penstock.fleet.route import Route
from penstock.ipc.placement import RequestPlacement
from penstock.ipc.streams import RequestEngine

COSTS = ("queue", "prefill", "pull", "harm", "memory", "shared")  # parts of a route's total
TRIAL = "tried where it does the least harm: an engine died that had it"
CRASHED, KILLED = "crashed", "killed"


@dataclass(slots=True)
class ReplicaTally:
    """Counts for one replica, over all lives of its engine. ReplicaFigures says what each field is."""

    routed: int = 0
    resumed: int = 0
    promised: int = 0
    told: int = 0
    restarts: int = 0
    lost: int = 0
    deaths: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def counts(self) -> dict[str, Any]:
        """Returns all counts by their names."""
        return {name: getattr(self, name) for name in self.__slots__}


class RouteDecision(NamedTuple):
    """Says where a request goes, and what was decided beside it."""

    route: Route
    source: str = ""  # the replica whose blocks are read; empty: none
    computing: str = ""  # the replica that computes the prompt; empty: the one that answers
    waited: float = 0.0  # seconds, until a replica had room
    seconds: float = 0.0  # that the decision took

    def why(self, name: Callable[[int], str]) -> str:
        """Returns the decision in words."""
        text = self.route.why(name)
        if self.computing:
            text += f"; {self.computing} computes the prompt"
        return f"{text}; waited {1000 * self.waited:.0f} ms for room" if self.waited else text


class FleetTally:
    """Observes the streams of a gateway. `name` says what the replica of a number is called."""

    def __init__(self, name: Callable[[int], str]) -> None:
        self._name = name
        self._replicas: dict[str, ReplicaTally] = {}
        self._routes: dict[int, RouteDecision] = {}  # by request: decided, and not sent yet
        self._promises: dict[int, tuple[ReplicaTally, int]] = {}  # by request without an answer: tokens to be reused

    def of(self, replica: str) -> ReplicaTally:
        """Returns the counts of a replica, which can be changed."""
        return self._replicas.setdefault(replica, ReplicaTally())

    def forget(self, replica: str) -> None:
        """Drops the counts of a replica that is not shown any more."""
        self._replicas.pop(replica, None)

    def decided(self, id: int, decision: RouteDecision) -> None:
        """Takes note of where a request is about to be sent."""
        self._routes[id] = decision

    def sent(self, id: int, engine: RequestEngine, *, resumed: bool) -> RequestPlacement:
        assert isinstance(engine, Replica)
        tally, decision = self.of(engine.name), self._routes.pop(id, None)
        tally.routed += 1
        tally.resumed += resumed
        if decision is None:
            return RequestPlacement(engine.name, f"{engine.name}: {TRIAL}", resumed=resumed)
        route = decision.route
        if not decision.computing:
            self._promises[id] = tally, route.cached + route.pulled
        costs = {name: getattr(route, name) for name in COSTS}
        why = decision.why(self._name)
        return RequestPlacement(engine.name, why, costs, route.cached, resumed, *decision[1:])

    def answered(self, id: int, cached: int) -> None:
        if (promise := self._promises.pop(id, None)) is not None:
            tally, promised = promise
            tally.promised += promised
            tally.told += cached

    def ended(self, id: int) -> None:
        self._routes.pop(id, None)
        self._promises.pop(id, None)
