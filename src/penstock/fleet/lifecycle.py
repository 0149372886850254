"""Follows the replicas of a gateway: it brings those that join up to date, takes their steps, and moves the requests of
those that leave or die."""

from __future__ import annotations

import asyncio
import logging

from penstock.errors import EngineUnavailable
from penstock.fleet.compatible import difference
from penstock.fleet.control import FleetControl
from penstock.fleet.deaths import DeathNotices
from penstock.fleet.directory import Death
from penstock.fleet.replica import Replica
from penstock.fleet.router import FleetRouter
from penstock.fleet.tally import CRASHED, KILLED, FleetTally
from penstock.fleet.totals import FleetTotals
from penstock.fleet.view import FleetView
from penstock.ipc import wire
from penstock.ipc.client import EngineState
from penstock.ipc.request_client import RequestClient
from penstock.ipc.restoring import EngineSettings
from penstock.ipc.shared_wire import Snapshot
from penstock.ipc.streams import RequestStreams
from penstock.types import Hello

log = logging.getLogger(__name__)

HAND_OVER_SECONDS = 2.0  # grace for the answers of a draining replica


class ReplicaLifecycle:
    """Implements MemberOwner for the `gateway`, whose state it changes."""

    def __init__(
        self,
        gateway: RequestClient,
        name: str,
        streams: RequestStreams,
        router: FleetRouter,
        control: FleetControl,
        settings: EngineSettings,
    ) -> None:
        self.totals = FleetTotals()
        self.tally = FleetTally()
        self._gateway = gateway
        self._streams = streams
        self._router = router
        self._control = control
        self._settings = settings
        self._notices = DeathNotices(name, streams)
        self._lives: dict[str, int] = {}  # replicas that have joined once, with their epochs
        self._warming: set[asyncio.Task[None]] = set()
        streams.dispatcher.observer = self.tally

    def close(self) -> None:
        for task in self._warming:
            task.cancel()

    # -- replicas that come --------------------------------------------------------------------------------------

    async def welcome(self, replica: Replica) -> None:
        hello, fleet = replica.hello, self._gateway.hello
        if fleet is None:
            self._view(hello)
            self._gateway.hello = hello
        elif reason := difference(fleet, hello):
            raise EngineUnavailable(f"{replica.name} cannot be used: {reason}")
        await self._control.update(replica, hello, first=not self._lives)

    def _view(self, hello: Hello) -> FleetView:
        """Returns the view of the fleet. The first replica decides which model and adapters it has."""
        if self._router.view is None:
            self._settings.adapters = {info.name: info for info in hello.adapters}
            self._gateway.hello = hello
        return self._router.begin(hello.limits, self._streams)

    def admit(self, replica: Replica) -> None:
        epoch = replica.info.epoch
        restarted = self._lives.get(replica.name, epoch) != epoch
        self._gateway.restarts += restarted
        self.tally.of(replica.name).restarts += restarted
        replica.draining = False
        self._router.admit(replica)
        if self._lives.get(replica.name) != epoch and len(self._router.ready()) > 1:
            self._warming.add(task := asyncio.create_task(self._warm_up(replica)))
            task.add_done_callback(self._warming.discard)
        self._lives[replica.name] = epoch
        self._gateway.state = EngineState.READY
        self._streams.dispatcher.resume()
        self._router.advance()

    async def _warm_up(self, replica: Replica) -> None:
        for request, pull in self._router.pulls_for(replica):
            if replica.ready:
                await self._streams.pulls.warm(replica, request, pull)

    # -- messages of replicas ------------------------------------------------------------------------------------

    def take_step(self, replica: Replica, step: wire.Step) -> None:
        self.totals.note(replica.info, step.stats)
        view = self._view(replica.hello)
        view.report(replica.number, step.stats, step.received)
        blocks = step.block_events()
        if blocks and not view.follow(replica.number, blocks[0].epoch, blocks):
            replica.ask_snapshot()
        if self._router.line is not None:
            self._router.line.charge(step.tokens)
        self._streams.deliver(replica, step.events())
        self._router.advance()

    def take_snapshot(self, replica: Replica, snapshot: Snapshot) -> None:
        self._view(replica.hello).restore(replica.number, snapshot.blocks)

    # -- replicas that go ----------------------------------------------------------------------------------------

    def shut_out(self, replica: Replica) -> None:
        """Sends a replica no new requests. Those that run for longer than HAND_OVER_SECONDS move to others."""
        if not replica.draining:
            asyncio.get_running_loop().call_later(HAND_OVER_SECONDS, self._hand_over, replica)
        replica.draining = True
        self._router.shut(replica)

    def _hand_over(self, replica: Replica) -> None:
        if replica.ready and replica.draining and self._router.quietest() is not None:
            self.move_from(replica)

    def move_from(self, replica: Replica) -> None:
        self.shut_out(replica)
        self._streams.move(replica)

    def lose(self, replica: Replica, reason: str, *, innocent: bool) -> None:
        """Sends the answered requests of a lost replica to others. The unanswered ones wait for a moment for the cause
        of its death."""
        level = logging.INFO if innocent or replica.draining else logging.ERROR
        log.log(level, "%s; %d of its requests go on elsewhere", reason, self._streams.dispatcher.load(replica)[1])
        self.tally.of(replica.name).lost += not innocent
        self._router.lose(replica, ended=innocent)
        self.totals.end(replica.info)
        if not self._router.ready() and self._gateway.state is EngineState.READY:
            self._gateway.state = EngineState.RESUMING
            self._gateway.unavailable_reason = f"{reason}; there is no other replica now: send this again"
        lost = self._streams.lose(replica, reason)
        if innocent:
            self._streams.judge.clear(lost)
        else:
            self._notices.lose((replica.name, replica.info.epoch), lost)
        self._streams.dispatcher.dispatch()

    def explain(self, death: Death) -> None:
        self.tally.of(death.replica).deaths[CRASHED if death.crashed else KILLED] += 1
        self._notices.explain(death)

    def forget_replica(self, name: str, number: int) -> None:
        """Forgets a replica that has ended for good; its counts stay."""
        if self._router.view is not None:
            self._router.view.drop(number)
        self.totals.forget(name)
        self.tally.forget(name)
        self._notices.forget(name)
        self._lives.pop(name, None)

    def note_refusal(self, replica: str, reason: str) -> None:
        self.tally.of(replica).refused[reason] += 1

    def give_up(self, reason: str) -> None:
        """Refuses requests: no replica is left, and none is being started."""
        if self._gateway.state is EngineState.RESUMING:
            self._gateway.refuse(reason)
