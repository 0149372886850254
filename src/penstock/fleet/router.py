"""Decides for each request of a gateway when it goes, to which replica, and which blocks that replica reads first."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.engine.chain_hash import chain_hash
from penstock.fleet.gateway_line import GatewayLine
from penstock.fleet.recent_prompts import RecentPrompts
from penstock.fleet.replica import Replica
from penstock.fleet.route import Route, RoutingWeights
from penstock.fleet.split import SplitRule
from penstock.fleet.view import FleetView, salt_of
from penstock.ipc.dispatch import Dispatch, Pull, RequestEngine
from penstock.ipc.placement import RequestPlacement
from penstock.ipc.restoring import EngineSettings
from penstock.ipc.streams import RequestStreams
from penstock.types import Limits, Request

COSTS = ("queue", "prefill", "pull", "harm", "memory", "shared")  # parts of a route's total
TRIAL = "tried where it does the least harm: an engine died that had it"


class FleetRouter:
    """Implements EngineChoice for the replicas of a gateway. `learn_digests` is called for a request that names an
    adapter whose digest is not known."""

    def __init__(
        self, weights: RoutingWeights, split: SplitRule, settings: EngineSettings, learn_digests: Callable[[], None]
    ) -> None:
        self.split = split
        self.recent = RecentPrompts()
        self.view: FleetView | None = None  # until the first replica joins
        self.line: GatewayLine | None = None  # the same
        self._weights = weights
        self._settings = settings
        self._learn_digests = learn_digests
        self._streams: RequestStreams | None = None
        self._replicas: dict[int, Replica] = {}  # joined replicas, by number
        self._block_size = 1

    def begin(self, limits: Limits, streams: RequestStreams) -> FleetView:
        """Takes the first replica's model as the fleet's; returns the view of it."""
        if self.view is None:
            self._streams, self._block_size = streams, limits.block_size
            self.view = FleetView(limits, chain_hash(), self._weights, self.split)
            self.line = GatewayLine(self.view, limits, self.advance, streams.end)
        return self.view

    # -- as an EngineChoice --------------------------------------------------------------------------------------

    @property
    def in_line(self) -> int:
        return 0 if self.line is None else len(self.line)

    def forget(self, id: int, generated: int) -> None:
        if self.line is not None:
            self.line.forget(id, generated)

    def place(
        self, request: Request, avoid: RequestEngine | None, source: RequestEngine | None = None
    ) -> Dispatch | None:
        """Returns where a request costs least; None: no replica can be chosen, or all have enough to do."""
        assert self.line is not None
        began, salt, avoided = time.perf_counter(), self.salt(request), _number(avoid)
        if not self.line.may_go(request, salt, avoided):
            return None
        return self._route(request, salt, avoid, source, began)

    def quietest(self) -> RequestEngine | None:
        assert self._streams is not None
        fit = [replica for replica in self.ready() if not replica.draining]
        return min(fit, key=self._streams.dispatcher.load, default=None)

    def trial(self, engine: RequestEngine) -> Dispatch:
        assert isinstance(engine, Replica)
        return Dispatch(engine, why=RequestPlacement(engine.name, f"{engine.name}: {TRIAL}"))

    def advance(self) -> None:
        if self.line is None or self._streams is None or not len(self.line):
            return
        dispatcher = self._streams.dispatcher
        reserved = dispatcher.reserved
        while (request := self.line.next(_number(reserved))) is not None:
            began, salt = time.perf_counter(), self.salt(request)
            left = request._replace(claim=request.claim.after(self.line.waited(request.id)))
            dispatch = self._route(left, salt, reserved, None, began)
            if dispatch is None:
                return  # it is placed again when the doubted request was answered for which others stay away
            dispatcher.start(request.id, dispatch)

    def _route(
        self, request: Request, salt: str, avoid: RequestEngine | None, source: RequestEngine | None, began: float
    ) -> Dispatch | None:
        assert self.view is not None
        assert self.line is not None
        number, now = _number(avoid), time.monotonic() * 1000
        if number is not None:
            self.view.shut(number)
        route = self.view.route(request, salt, now)
        if isinstance(avoid, Replica) and avoid.ready and not avoid.draining:
            self.view.open(avoid.number)
        if route is None:
            return None
        replica, pull = self._replicas[route.replica], None
        if not self._settings.weights.updates:
            self.recent.note(request, salt)
            pull = self._pull(replica, route, request, salt, source)
        self.line.enter(request, route.uncached)
        waited = self.line.waited(request.id)
        promised = None if pull is not None and pull.compute else route.cached + route.pulled
        why = self._why(route, pull, waited, time.perf_counter() - began)
        return Dispatch(replica, pull, why, promised, waited)

    def _pull(
        self, replica: Replica, route: Route, request: Request, salt: str, moved_from: RequestEngine | None
    ) -> Pull | None:
        """Returns where blocks of a prompt come from that its replica does not hold; None: it computes them."""
        assert self.view is not None
        first, device = route.cached // self._block_size, replica.hello.device
        if isinstance(moved_from, Replica) and moved_from.ready:
            return Pull(moved_from, salt, first, device)
        elsewhere = self.view.prefill_elsewhere(route, request, time.monotonic() * 1000)
        number = route.source if elsewhere is None else elsewhere
        source = None if number is None else self._replicas.get(number)
        return None if source is None else Pull(source, salt, first, device, compute=elsewhere is not None)

    def _why(self, route: Route, pull: Pull | None, waited: float, seconds: float) -> RequestPlacement:
        name, why = self.name_of(route.replica), route.why(self.name_of)
        source = pull.source.name if pull is not None and isinstance(pull.source, Replica) else ""
        computing = source if pull is not None and pull.compute else ""
        if computing:
            why += f"; {computing} computes the prompt"
        if waited:
            why += f"; waited {1000 * waited:.0f} ms for room"
        return RequestPlacement(
            name,
            why,
            {part: getattr(route, part) for part in COSTS},
            route.cached,
            source="" if computing else source,
            computing=computing,
            waited=waited,
            decided=seconds,
        )

    # -- replicas ------------------------------------------------------------------------------------------------

    def ready(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.ready]

    def name_of(self, number: int) -> str:
        replica = self._replicas.get(number)
        return f"replica {number}" if replica is None else replica.name

    def admit(self, replica: Replica) -> None:
        assert self.view is not None
        self._replicas[replica.number] = replica
        self.view.open(replica.number)

    def shut(self, replica: Replica) -> None:
        if self.view is not None:
            self.view.shut(replica.number)

    def lose(self, replica: Replica, *, ended: bool) -> None:
        """Removes a replica; if its engine has `ended`, with all its blocks."""
        if self._replicas.get(replica.number) is replica:
            del self._replicas[replica.number]
        if self.view is not None:
            (self.view.drop if ended else self.view.lose)(replica.number)

    # -- prompts -------------------------------------------------------------------------------------------------

    def salt(self, request: Request) -> str:
        adapters = self._settings.adapters
        named = (adapters.get(use.name) for use in request.adapters)
        if any(info is not None and not info.digest for info in named):
            self._learn_digests()
        return salt_of(request, adapters, self._settings.weights)

    def cached_tokens(self, request: Request) -> int:
        return 0 if self.view is None else len(request.prompt) - self.view.uncached(request, self.salt(request))

    def pulls_for(self, replica: Replica) -> list[tuple[Request, Pull]]:
        assert self.view is not None
        found = []
        for request, salt in self.recent.newest_first():
            holders = (self._replicas.get(number) for number in self.view.holders(request, salt))
            source = next((each for each in holders if each is not None and each is not replica), None)
            if source is not None:
                found.append((request, Pull(source, salt, 0, replica.hello.device)))
        return found


def _number(engine: RequestEngine | None) -> int | None:
    return engine.number if isinstance(engine, Replica) else None
