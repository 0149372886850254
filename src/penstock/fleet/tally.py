"""Counts for each replica of a gateway the requests that it was sent, and its deaths."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from penstock.fleet.replica import Replica
from penstock.ipc.dispatch import Dispatch, RequestEngine

CRASHED, KILLED = "crashed", "killed"


@dataclass(slots=True)
class ReplicaTally:
    """Counts for one replica, over all lives of its engine. ReplicaFigures describes each field."""

    routed: int = 0
    resumed: int = 0
    promised: int = 0
    told: int = 0
    restarts: int = 0
    lost: int = 0
    deaths: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def counts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class FleetTally:
    """Implements DispatchObserver."""

    def __init__(self) -> None:
        self._replicas: dict[str, ReplicaTally] = {}

    def of(self, replica: str) -> ReplicaTally:
        return self._replicas.setdefault(replica, ReplicaTally())

    def forget(self, replica: str) -> None:
        self._replicas.pop(replica, None)

    def sent(self, dispatch: Dispatch, *, resumed: bool) -> None:
        assert isinstance(dispatch.engine, Replica)
        tally = self.of(dispatch.engine.name)
        tally.routed += 1
        tally.resumed += resumed

    def answered(self, engine: RequestEngine, promised: int, cached: int) -> None:
        assert isinstance(engine, Replica)
        tally = self.of(engine.name)
        tally.promised += promised
        tally.told += cached
