"""Implements the engine client of a gateway: many replicas of one engine look like one.

Each request goes to the replica where it costs least. When a replica is lost, the others resume its requests.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock.errors import EngineUnavailable
from penstock.fleet.control import FleetControl
from penstock.fleet.directory import DirectorySource, ReplicaInfo
from penstock.fleet.ledger import Load
from penstock.fleet.lifecycle import ReplicaLifecycle
from penstock.fleet.membership import Membership
from penstock.fleet.replica import Credentials, Replica
from penstock.fleet.route import RoutingWeights
from penstock.fleet.router import FleetRouter
from penstock.fleet.scale import MeasuredLoad
from penstock.fleet.split import SplitOptions, SplitRule
from penstock.ipc.client import EngineState
from penstock.ipc.placement import FleetFigures, ReplicaFigures, ScaleStatus
from penstock.ipc.request_client import RequestClient
from penstock.ipc.restoring import EngineSettings
from penstock.types import Event, Hello, Request, Stats
from penstock.types.messages import Control, Message

PULLING = RoutingWeights(pull=True)


class FleetClient(RequestClient):
    """Implements EngineClient for the replicas of a directory."""

    def __init__(
        self,
        source: DirectorySource,
        *,
        name: str = "",
        weights: RoutingWeights = PULLING,
        split: SplitOptions | None = None,
        scale: Callable[[], ScaleStatus | None] = lambda: None,
    ) -> None:
        """`scale` returns how many replicas there should be, if somebody changes their number."""
        settings = EngineSettings()
        self._router = FleetRouter(weights, SplitRule(split), settings, lambda: self._control.learn_digests())
        super().__init__(self._router, settings)
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._scale = scale
        self._control = FleetControl(self._router.ready, self._streams.controls, settings, self.next_id)
        self._lifecycle = ReplicaLifecycle(self, self.name, self._streams, self._router, self._control, settings)
        self._members = Membership(source, lambda: Credentials(self.name, source.secret), self._lifecycle)

    async def start(self, *, yielding: bool = False) -> Hello:
        """Waits for the first replica; raises the error that keeps all from starting. `yielding` is ignored."""
        if self.state is EngineState.STARTING:
            await self._members.start()
        if self.hello is None:
            raise EngineUnavailable(self.unavailable_reason)
        return self.hello

    async def close(self) -> None:
        self.refuse("the fleet is closed")
        self._control.close()
        self._lifecycle.close()
        await self._members.close()

    # -- figures -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Returns the sums over all replicas. Requests in the gateway's queue count as waiting."""
        stats, waiting = self._lifecycle.totals.sum(), self._router.in_line
        return stats._replace(waiting=stats.waiting + waiting, in_line=stats.in_line + waiting) if waiting else stats

    @property
    def replicas(self) -> tuple[ReplicaInfo, ...]:
        return tuple(self._members.infos())

    @property
    def replica_figures(self) -> tuple[ReplicaFigures, ...]:
        return tuple(self._figures(info) for info in self._members.infos())

    @property
    def fleet_figures(self) -> FleetFigures:
        line, pulls, splits = self._router.line, self._streams.pulls.counts, self._router.split.decisions
        decisions = {"pulls": pulls, "splits": splits, "turns": Counter[str]() if line is None else line.counts}
        return FleetFigures(self._router.in_line, 0.0 if line is None else line.seconds, self._scale(), decisions)

    def _figures(self, info: ReplicaInfo) -> ReplicaFigures:
        number, view = self._members.number_of(info.name), self._router.view
        load = Load() if view is None or number is None else view.load(number)
        counts = self._lifecycle.tally.of(info.name).counts()
        stats = self._lifecycle.totals.latest(info.name)
        return ReplicaFigures(info.name, info.state, stats, load.queued, load.kv_tokens, **counts)

    def cached_tokens(self, request: Request) -> int:
        return self._router.cached_tokens(request)

    def note_refused(self, request: Request) -> None:
        if self._router.line is not None:
            self._router.line.note_refused(request, self._router.salt(request))

    def measured_load(self) -> MeasuredLoad | None:
        """Returns the load of this gateway and the speed of replicas; None: nothing is known yet."""
        return None if self._router.line is None else self._router.line.measured()

    # -- control messages ----------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        for replica in self._reachable():
            replica.send(message)

    async def _ask(self, message: Control[Any]) -> Event:
        return await self._control.ask_all(message, self._reachable())

    def _reachable(self) -> list[Replica]:
        replicas = self._router.ready()
        if not replicas:
            raise EngineUnavailable(self.unavailable_reason)
        return replicas
