"""Is the engine client of a gateway: many replicas of one engine behind the interface of one.

Each request goes to the replica where it costs least. When a replica is lost, the others go on with its streams.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from penstock.engine.chain_hash import chain_hash
from penstock.errors import EngineUnavailable, PenstockError
from penstock.fleet.compatible import difference
from penstock.fleet.deaths import DeathNotices
from penstock.fleet.directory import Death, DirectorySource, ReplicaInfo
from penstock.fleet.gateway_line import GatewayLine
from penstock.fleet.ledger import Load
from penstock.fleet.membership import Membership
from penstock.fleet.pulls import FleetPulls, PullPlan
from penstock.fleet.recent_prompts import RecentPrompts
from penstock.fleet.replica import Credentials, Replica
from penstock.fleet.route import Route, RoutingWeights
from penstock.fleet.scale import MeasuredLoad
from penstock.fleet.split import SplitOptions, SplitRule
from penstock.fleet.tally import CRASHED, KILLED, FleetTally, RouteDecision
from penstock.fleet.totals import FleetTotals
from penstock.fleet.view import FleetView, salt_of
from penstock.ipc import wire
from penstock.ipc.client import EngineState
from penstock.ipc.placement import FleetFigures, ReplicaFigures, ScaleStatus
from penstock.ipc.request_client import RequestClient
from penstock.ipc.restoring import EngineChanges
from penstock.ipc.shared_wire import Snapshot
from penstock.ipc.streams import RequestEngine
from penstock.types import AdapterInfo, AdapterList, Event, Hello, MemoryUse, Request, Stats, WeightState
from penstock.types.messages import (
    Control,
    DescribeWeights,
    ListAdapters,
    Message,
    Pause,
    RegisterAdapter,
    Resume,
    UnregisterAdapter,
)

log = logging.getLogger(__name__)

DIGEST_SECONDS = 0.5  # after a request for an adapter whose digest is not known, until replicas are asked for it
HAND_OVER_SECONDS = 2.0  # that answers of a draining replica have to end there
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
        """Takes who knows the replicas and, if somebody changes their number, who knows of that."""
        super().__init__()
        self._scale = scale
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._source = source
        self._routing = weights
        self._members = Membership(source, lambda: Credentials(self.name, source.secret), self)
        self._view: FleetView | None = None
        self._line: GatewayLine | None = None  # of requests that wait until a replica has room
        self.split = SplitRule(split)
        self.pulls = FleetPulls(self._streams.answer, self._streams.deliver, self.next_id)
        self._recent = RecentPrompts()
        self._warming: set[asyncio.Task[None]] = set()
        self._leaving: Replica | None = None  # whose streams are being moved
        self._totals = FleetTotals()
        self._tally = self._streams.observer = FleetTally(self._members.name_of)
        self._forgotten: set[str] = set()  # adapters that were unregistered here
        self._paused: set[tuple[str, int]] = set()  # engines that were told here to pause, by name and epoch
        self._learning: asyncio.Task[None] | None = None  # the digests of adapters that requests have named
        self._notices = DeathNotices(self.name, self._streams)
        self._lives: dict[str, int] = {}  # replicas that have joined once, with their epochs

    # -- as an EngineClient --------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Returns the statistics of all replicas, added up. What waits here waits for them."""
        stats, waiting = self._totals.sum(), self.in_line
        return stats._replace(waiting=stats.waiting + waiting, in_line=stats.in_line + waiting) if waiting else stats

    @property
    def in_line(self) -> int:
        """Returns how many requests wait until a replica has room."""
        return 0 if self._line is None else len(self._line)

    def forget(self, id: int, generated: int) -> None:
        if self._line is not None:
            self._line.forget(id, generated)

    def cached_tokens(self, request: Request) -> int:
        if self._view is None:
            return 0
        return len(request.prompt) - self._view.uncached(request, salt_of(request, self.adapters, self.weights))

    def note_refused(self, request: Request) -> None:
        if self._line is not None:
            self._line.note_refused(request, salt_of(request, self.adapters, self.weights))

    def measured_load(self) -> MeasuredLoad | None:
        """Returns the load of this gateway and how fast replicas are; None: nothing is known yet."""
        return None if self._line is None else self._line.measured()

    @property
    def replicas(self) -> tuple[ReplicaInfo, ...]:
        """Returns what is known of each replica, as seen from this gateway."""
        return tuple(self._members.infos())

    @property
    def replica_figures(self) -> tuple[ReplicaFigures, ...]:
        """Returns what each replica does and owes, and what became of it."""
        return tuple(self._figures(info) for info in self._members.infos())

    @property
    def fleet_decisions(self) -> dict[str, Counter[str]]:
        """Returns what became of offers of blocks, why prompts were computed elsewhere or not, and who had to wait."""
        turns = Counter[str]() if self._line is None else self._line.counts
        return {"pulls": self.pulls.counts, "splits": self.split.decisions, "turns": turns}

    @property
    def fleet_figures(self) -> FleetFigures:
        """Returns how many requests wait here, for how long others have, and how many replicas there are to be."""
        return FleetFigures(self.in_line, 0.0 if self._line is None else self._line.seconds, self._scale())

    def _figures(self, info: ReplicaInfo) -> ReplicaFigures:
        number = self._members.number_of(info.name)
        load = Load() if self._view is None or number is None else self._view.load(number)
        counts = self._tally.of(info.name).counts()
        stats = self._totals.latest(info.name)
        return ReplicaFigures(info.name, info.state, stats, load.queued, load.kv_tokens, **counts)

    async def start(self, *, yielding: bool = False) -> Hello:
        """Waits for the first replica; raises what keeps all from starting. Starting twice changes nothing. `yielding`
        has no effect here."""
        if self.state is EngineState.STARTING:
            await self._members.start()
        if self.hello is None:
            raise EngineUnavailable(self.unavailable_reason)
        return self.hello

    async def close(self) -> None:
        self._refuse("the fleet is closed")
        if self._learning is not None:
            self._learning.cancel()
        self.pulls.close()
        for task in self._warming:
            task.cancel()
        await self._members.close()

    def _remember(self, message: Control[Any], answer: Event) -> None:
        super()._remember(message, answer)
        if isinstance(message, UnregisterAdapter):
            self._forgotten.add(message.name)
        if isinstance(message, RegisterAdapter):
            self._forgotten.discard(message.name)

    # -- where requests go ---------------------------------------------------------------------------------------

    def place(self, request: Request, avoid: RequestEngine | None) -> RequestEngine | None:
        """Returns the replica where a request costs least; None: there is none now, or all have enough to do."""
        if self._view is None or self._line is None or self.hello is None:
            raise EngineUnavailable(self.unavailable_reason)
        named = (self.adapters.get(use.name) for use in request.adapters)
        if self._learning is None and any(info is not None and not info.digest for info in named):
            self._learning = asyncio.create_task(self._learn_digests())
        began = time.perf_counter()
        kept_out = avoid if isinstance(avoid, Replica) else None
        salt = salt_of(request, self.adapters, self.weights)
        if not self._line.lets_go(request, salt, None if kept_out is None else kept_out.number):
            return None
        if kept_out is not None:
            self._view.shut(kept_out.number)
        route = self._view.route(request, salt, _now_ms())
        if kept_out is not None and kept_out.ready and not kept_out.draining:
            self._view.open(kept_out.number)
        if route is None:
            return None
        plan = None
        if not self.weights.updates:
            self._recent.note(request, salt)
            plan = self._plan(route, request, salt)
            self.pulls.plan(request.id, plan)
        if (replica := self._members.numbered(route.replica)) is not None:
            source = "" if plan is None else plan.source.name
            roles = ("", source) if plan is not None and plan.compute else (source, "")
            times = self._line.sent(request, route.uncached), time.perf_counter() - began
            self._tally.decided(request.id, RouteDecision(route, *roles, *times))
        return replica

    def _plan(self, route: Route, request: Request, salt: str) -> PullPlan | None:
        """Returns where blocks of a prompt come from that its replica does not hold; None: it computes them."""
        assert self._view is not None
        assert self.hello is not None
        first = route.cached // self.hello.limits.block_size
        if self._leaving is not None:
            return PullPlan(self._leaving, salt, first)
        if (number := self._view.prefill_elsewhere(route, request, _now_ms())) is not None:
            source = self._members.numbered(number)
            return None if source is None else PullPlan(source, salt, first, compute=True)
        source = None if route.source is None else self._members.numbered(route.source)
        return None if source is None else PullPlan(source, salt, first)

    def hold(self, replica: Replica, message: Message) -> bool:
        """Returns whether a request waits for blocks before it is sent."""
        return self.pulls.hold(replica, message)

    def quietest(self) -> RequestEngine | None:
        """Returns the replica that has the fewest requests which it has not answered, and the fewest others."""
        ready = [replica for replica in self._members.ready() if not replica.draining]
        return min(ready, key=self._streams.load, default=None)

    async def _learn_digests(self) -> None:
        """Asks replicas for the digests of adapters that they have loaded: these are part of the salts of blocks."""
        await asyncio.sleep(DIGEST_SECONDS)
        for replica in self._members.ready():
            if all(info.digest for info in self.adapters.values()):
                break
            with suppress(PenstockError):
                listed = await self._streams.answer(replica, ListAdapters(id=self.next_id()))
                assert isinstance(listed, AdapterList)
                for info in listed.adapters:
                    if info.digest and info._replace(digest="", loaded=False) == self._unloaded(info.name):
                        self.adapters[info.name] = info
        self._learning = None

    def _unloaded(self, name: str) -> AdapterInfo | None:
        known = self.adapters.get(name)
        return None if known is None else known._replace(digest="", loaded=False)

    # -- control messages ----------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        for replica in self._reachable():
            replica.send(message)

    async def _ask(self, message: Control[Any]) -> Event:
        """Asks all replicas and returns an answer that stands for all. Those that are lost meanwhile do not count, and
        those that join are asked too. What one refuses has no effect on others."""
        replicas, answers = self._reachable(), list[Event | BaseException]()
        while rest := replicas[len(answers) :]:
            asking = [self._ask_one(each, message) for each in rest]
            answers += await asyncio.gather(*asking, return_exceptions=True)
            replicas += [each for each in self._members.ready() if each not in replicas]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        refused = next((error for error in errors if not isinstance(error, EngineUnavailable)), None)
        told = [
            (each, answer)
            for each, answer in zip(replicas, answers, strict=True)
            if not isinstance(answer, BaseException)
        ]
        if refused is not None or not told:
            if isinstance(message, RegisterAdapter):
                self._undo(message, [replica for replica, _ in told])
            raise refused or errors[0]
        events = [answer for _, answer in told]
        return _together(events)

    async def _ask_one(self, replica: Replica, message: Control[Any]) -> Event:
        """Asks one replica, and remembers whether it was told to pause: it may be lost before it answers."""
        key = replica.name, replica.info.epoch
        if isinstance(message, Pause):
            self._paused.add(key)
        event = await self._streams.answer(replica, message._replace(id=self.next_id()))
        if isinstance(message, Resume):
            self._paused.discard(key)
        return event

    def _undo(self, message: RegisterAdapter, replicas: Sequence[Replica]) -> None:
        """Has replicas forget an adapter that others have refused, unless it was registered before."""
        if message.name not in self.adapters:
            for replica in replicas:
                replica.send(UnregisterAdapter(message.name, id=self.next_id()))

    def _reachable(self) -> list[Replica]:
        replicas = self._members.ready()
        if not replicas:
            raise EngineUnavailable(self.unavailable_reason)
        return replicas

    # -- as the owner of replicas: those that come ---------------------------------------------------------------

    async def welcome(self, replica: Replica) -> None:
        """Checks that a replica has the fleet's model, and tells it what the others were told."""
        hello = replica.hello
        if self._view is None or self.hello is None:
            self._begin(hello)
        elif reason := difference(self.hello, hello):
            raise EngineUnavailable(f"{replica.name} cannot be used: {reason}")
        told: tuple[object, ...] = ()
        while told != (told := self._changes()):  # others were told more meanwhile
            has = await self._ask_one(replica, DescribeWeights())
            assert isinstance(has, WeightState)
            if not self._lives:
                self.weights = has
            if has.paused and not self.weights.paused and (replica.name, replica.info.epoch) in self._paused:
                await self._ask_one(replica, Resume())  # it was not there when the others were told to
            if changes := self._missing(hello, has):
                await changes.tell(lambda message: self._ask_one(replica, message))

    def _changes(self) -> tuple[object, ...]:
        """Returns what replicas were told since they were started."""
        return self.weights._replace(seq=0), dict(self.adapters), set(self._forgotten)

    def _begin(self, hello: Hello) -> FleetView:
        """Takes the first replica's model as the fleet's. After a time without any, that is the next one's."""
        if self._view is None:
            self._view = FleetView(hello.limits, chain_hash(), self._routing, self.split)
            self._line = GatewayLine(self._view, hello.limits, self._streams)
            self.adapters = {info.name: info for info in hello.adapters}
        self.hello = hello
        return self._view

    def _missing(self, hello: Hello, has: WeightState) -> EngineChanges:
        """Returns what a replica has to be told to be as the others are."""
        known = {(info.name, info.path, info.scale) for info in hello.adapters}
        missing = [each for each in self.adapters.values() if (each.name, each.path, each.scale) not in known]
        forgotten = [info.name for info in hello.adapters if info.name in self._forgotten]
        same = has._replace(seq=0) == self.weights._replace(seq=0)
        return EngineChanges(missing, forgotten, WeightState() if same else self.weights)

    def admit(self, replica: Replica) -> None:
        """Sends requests to a replica from now on."""
        assert self._view is not None
        restarted = self._lives.get(replica.name, replica.info.epoch) != replica.info.epoch
        self.restarts += restarted
        self._tally.of(replica.name).restarts += restarted
        if self._lives.get(replica.name) != replica.info.epoch and len(self._members.ready()) > 1:
            self._warming.add(task := asyncio.create_task(self._warm_up(replica)))
            task.add_done_callback(self._warming.discard)
        self._lives[replica.name] = replica.info.epoch
        replica.draining = False
        self._view.open(replica.number)
        self.state = EngineState.READY
        self._streams.resume()
        self._advance()

    async def _warm_up(self, replica: Replica) -> None:
        """Has a new replica read what others hold of recent prompts, beside the requests that it gets."""
        assert self._view is not None
        for request, salt in self._recent.newest_first():
            holders = (self._members.numbered(number) for number in self._view.holders(request, salt))
            source = next((each for each in holders if each is not None and each is not replica), None)
            if source is not None and replica.ready:
                await self.pulls.warm(replica, request, PullPlan(source, salt, 0))

    # -- as the owner of replicas: what they say -----------------------------------------------------------------

    def take_step(self, replica: Replica, step: wire.Step) -> None:
        """Passes a step's events on, and notes what it says about the replica."""
        self._totals.note(replica.info, step.stats)
        view = self._view or self._begin(replica.hello)
        view.report(replica.number, step.stats, step.received)
        blocks = step.block_events()
        if blocks and not view.follow(replica.number, blocks[0].epoch, blocks):
            replica.ask_snapshot()
        if self._line is not None:
            self._line.charge(step.tokens)
        self._streams.deliver(replica, step.events())
        self._advance()

    def _advance(self) -> None:
        """Sends those that wait here, as far as replicas have room."""
        if self._line is not None:
            self._line.advance()

    def take_snapshot(self, replica: Replica, snapshot: Snapshot) -> None:
        """Notes what a replica's prefix cache holds."""
        view = self._view or self._begin(replica.hello)
        view.restore(replica.number, snapshot.blocks)

    # -- as the owner of replicas: those that go -----------------------------------------------------------------

    def shut_out(self, replica: Replica) -> None:
        """Sends a replica no new requests. What it does not answer soon, others go on with."""
        assert self._view is not None
        if not replica.draining:
            asyncio.get_running_loop().call_later(HAND_OVER_SECONDS, self._hand_over, replica)
        replica.draining = True
        self._view.shut(replica.number)

    def _hand_over(self, replica: Replica) -> None:
        """Moves the streams of a replica that is still draining, if there is one to go on with them."""
        if replica.ready and replica.draining and self.quietest() is not None:
            self.move_from(replica)

    def move_from(self, replica: Replica) -> None:
        """Has other replicas go on with what a replica answers. They read what it has computed. It gets no more
        requests."""
        self.shut_out(replica)
        self._leaving = replica
        self._streams.move(replica)
        self._leaving = None

    def lose(self, replica: Replica, reason: str, *, innocent: bool) -> None:
        """Has other replicas go on with what a lost one has answered. What it had not answered waits a moment for word
        of how it died."""
        level = logging.INFO if innocent or replica.draining else logging.ERROR
        log.log(level, "%s; %d of its requests go on elsewhere", reason, self._streams.load(replica)[1])
        self._tally.of(replica.name).lost += not innocent
        if self._view is not None:
            (self._view.drop if innocent else self._view.lose)(replica.number)
        self._totals.end(replica.info)
        if not self._members.ready() and self.state is EngineState.READY:
            self.state = EngineState.RESUMING
            self.unavailable_reason = f"{reason}; there is no other replica now: send this again"
        self._members.forget(replica)
        lost = self._streams.lose(replica, reason)
        if innocent:
            self._streams.trust(lost)
        else:
            self._notices.lose((replica.name, replica.info.epoch), lost)
        self._streams.dispatch()

    def explain(self, death: Death) -> None:
        """Takes the word of whoever kept an engine that has died."""
        self._tally.of(death.replica).deaths[CRASHED if death.crashed else KILLED] += 1
        self._notices.explain(death)

    def forget_replica(self, name: str, number: int) -> None:
        """Forgets a replica that has ended for good; what it has done still counts."""
        if self._view is not None:
            self._view.drop(number)
        self._totals.forget(name)
        self._tally.forget(name)
        self._notices.forget(name)
        self._lives.pop(name, None)

    def note_refusal(self, replica: str, reason: str) -> None:
        """Counts an attempt to join a replica that failed."""
        self._tally.of(replica).refused[reason] += 1

    def give_up(self, reason: str) -> None:
        """Refuses requests: no replica is left, and none is being started."""
        if self.state is EngineState.RESUMING:
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        """Ends all requests in flight and refuses new ones for this reason."""
        self.hello, self.state, self.unavailable_reason = None, EngineState.FAILED, reason
        self._streams.fail("engine_died", reason)


def _now_ms() -> float:
    return time.monotonic() * 1000


def _together(events: Sequence[Event]) -> Event:
    """Returns one answer for those of all replicas: the same, or what they take together."""
    first = events[0]
    if isinstance(first, MemoryUse):
        uses = [event for event in events if isinstance(event, MemoryUse)]
        return MemoryUse(first.seq, sum(use.device for use in uses), sum(use.host for use in uses))
    return first
