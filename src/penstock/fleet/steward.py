"""Keeps a fleet in its wanted state: `python -m penstock.fleet.steward FOLDER`, with its spec as a line of JSON on
standard input. It starts keepers, replaces lost ones, drains, scales and upgrades, and sends every gateway the
directory of replicas.

No request passes through it. It may die at any time: a gateway starts the next one, to which the keepers report. The
fleet ends when its last gateway leaves, or after a minute without one.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError, EngineUnavailable, PenstockError
from penstock.fleet import MOST_REPLICAS
from penstock.fleet.autoscaler import Autoscaler
from penstock.fleet.directory import Directory, ReplicaInfo
from penstock.fleet.ground import LOCAL, Ground, forks_of, make_ground
from penstock.fleet.roster import KeptReplica, Roster, RosterPlan
from penstock.fleet.run_file import write_run_file
from penstock.fleet.steward_socket import ABANDONED, Gateways, StewardSocket
from penstock.fleet.steward_wire import (
    AskStatus,
    Command,
    CommandRefused,
    DirectoryUpdate,
    DrainReplica,
    FleetSpec,
    FleetStatus,
    GatewayBeat,
    GatewayLeave,
    KeeperOrder,
    KeeperReport,
    KeeperSpec,
    MemberStatus,
    ScaleFleet,
    StartFailure,
    ToSteward,
    UpgradeFleet,
    WrongProtocol,
)

log = logging.getLogger(__name__)

TICK = 0.1  # seconds between two looks at the roster
DECISION = 1.0  # seconds between two looks at the load
ADOPTION = 3.0  # seconds that keepers of an earlier steward have to say who they are
ENDING = 8.0  # seconds that all replicas have to end
GIVING_BACK = 3.0  # seconds that the ground has to end: it may be gone itself


class Steward:
    """Serves one socket and looks at the roster again and again."""

    def __init__(self, spec: FleetSpec, make: Callable[[FleetSpec, Callable[[str, str], None]], Ground]) -> None:
        self._spec = spec
        self._older = spec  # before the upgrade that goes on now
        self._latest_revision = spec.revision  # one that was taken back is not used again
        self._roster = Roster(
            spec.name,
            spec.replicas,
            revision=spec.revision,
            next_number=spec.next_number,
            version=time.time_ns() // 1_000_000,  # higher than every one of the steward before
        )
        self._ground = make(spec, self._lose_keeper)
        self._awake = 0.0  # seconds that this process was awake: one that was stopped has missed beats
        self._gateways = Gateways()
        self._keepers: dict[str, bytes] = {}  # routes, by replica
        self._ending = False
        self._next_decision = 0.0  # when the load is looked at next
        self._adopting = spec.adopt  # some keepers have not said yet who they are
        self._working: set[asyncio.Task[None]] = set()
        self._upgrade_failure: StartFailure | None = None
        self._autoscaler = Autoscaler(spec)
        self._link = StewardSocket(spec.secret)

    async def run(self) -> None:
        self._link.bind(self._spec.address)
        self._save()
        listening = asyncio.create_task(self._listen())
        try:
            await self._look_again_and_again()
            with suppress(TimeoutError):
                async with asyncio.timeout(GIVING_BACK):
                    await asyncio.gather(*map(self._forget_keeper, self._roster.replicas))
                    await self._ground.close()
        finally:
            listening.cancel()
            self._link.close(linger=200)

    def _save(self) -> None:
        roster = self._roster
        self._spec = msgspec.structs.replace(
            self._spec,
            replicas=roster.wanted,
            revision=roster.revision,
            next_number=roster.next_number,
            adopt=True,
            steward_pid=os.getpid(),
            host=socket.gethostname(),
        )
        write_run_file(self._spec)

    # -- messages in -------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        async for route, message in self._link.messages():
            if isinstance(message, WrongProtocol):  # a keeper of another version cannot keep a replica
                self._roster.refuse(message.sender, StartFailure(message.code, message.message))
            else:
                self._take(route, message)

    def _take(self, route: bytes, message: ToSteward) -> None:
        match message:
            case GatewayBeat():
                self._gateways.note(route, message, self._awake)
                self._link.send(route, self._update())
            case GatewayLeave():
                self._gateways.leave(message.gateway)
                self._link.send(route, self._status())
                if not len(self._gateways):
                    self._end("its last gateway has left")
            case KeeperReport():
                self._keepers[message.replica.name] = route
                replica = self._roster.take(message, self._awake)
                self._link.send(route, KeeperOrder(end=replica.ending or self._ending))
                self._look()
            case _:
                self._link.send(route, self._obey(message))

    def _obey(self, command: Command) -> FleetStatus | CommandRefused:
        try:
            match command:
                case AskStatus():
                    pass
                case DrainReplica(replica=name):
                    self._drain(name)
                case ScaleFleet(replicas=count, most=most):
                    self._scale(count, most)
                case UpgradeFleet():
                    self._upgrade(command)
        except PenstockError as error:
            return CommandRefused(error.code, error.message)
        self._look()
        return self._status()

    def _drain(self, name: str) -> None:
        known = self._roster.replicas
        if name not in known or known[name].ended is not None:
            names = ", ".join(each for each, replica in known.items() if replica.ended is None) or "none"
            raise ConfigError(f"there is no replica {name!r}; the replicas are {names}")
        self._roster.drain(name, self._awake)

    def _scale(self, count: int, most: int) -> None:
        if not 1 <= count <= (most or count) <= MOST_REPLICAS:
            told = f"{count}:{most}" if most else count
            raise ConfigError(f"a fleet has from 1 to {MOST_REPLICAS} replicas, the fewest first; got {told}")
        self._autoscaler.use(count, most or count)
        self._spec = msgspec.structs.replace(self._spec, scaling=self._autoscaler.spec)
        self._roster.wanted = min(max(self._roster.wanted, count), most) if most else count
        self._save()

    def _upgrade(self, command: UpgradeFleet) -> None:
        if self._is_upgrading:
            raise ConfigError("an upgrade goes on already: wait until penstock fleet status shows that it has ended")
        self._older, self._upgrade_failure = self._spec, None
        self._latest_revision += 1
        self._roster.revision = self._latest_revision
        self._spec = msgspec.structs.replace(self._spec, config=command.config)
        self._save()

    @property
    def _is_upgrading(self) -> bool:
        roster = self._roster
        return any(each.revision != roster.revision for each in roster.replicas.values() if not each.leaving)

    def _lose_keeper(self, name: str, reason: str) -> None:
        if not self._ending:
            replica = self._roster.replicas.get(name)
            if replica is not None and not replica.ending:
                log.error("%s is lost: %s", name, reason)
        self._roster.lose_keeper(name, self._awake, reason)

    # -- actions -----------------------------------------------------------------------------------------------------

    async def _look_again_and_again(self) -> None:
        before = time.monotonic()
        deadline = None
        while not (self._ending and all(each.ended is not None for each in self._roster.replicas.values())):
            await asyncio.sleep(TICK)
            now = time.monotonic()
            self._awake, before = self._awake + min(now - before, 2 * TICK), now
            self._look()
            if self._ending:
                deadline = deadline or self._awake + ENDING
                if self._awake > deadline:
                    log.error("some replicas have not ended; their engines end by themselves")
                    return

    def _look(self) -> None:
        """Does what the roster plans."""
        if self._ending:
            return self._carry_out(self._roster.end_all(self._awake))
        self._gateways.forget_silent(self._awake)
        if self._gateways.is_abandoned(self._awake):
            return self._end(f"it has had no gateway for {ABANDONED:.0f} s")
        if self._adopting and self._awake < ADOPTION and len(self._roster.replicas) < self._roster.wanted:
            return None
        self._adopting = False
        before = self._wishes
        self._take_back_hopeless_upgrade()
        if self._awake >= self._next_decision and not self._is_upgrading:
            self._next_decision = self._awake + DECISION
            self._roster.wanted = self._autoscaler.decide(self._gateways.measured, self._roster.wanted, self._awake)
        self._carry_out(self._roster.plan(self._awake, self._spec.drain_seconds, self._gateways.seen))
        if self._wishes != before or self._spec.replicas != self._roster.wanted:
            self._save()
        self._gateways.push(self._update(), self._link)

    @property
    def _wishes(self) -> tuple[int, int, int]:
        return self._roster.wanted, self._roster.revision, self._roster.next_number

    def _take_back_hopeless_upgrade(self) -> None:
        failure = self._roster.hopeless_upgrade
        if failure is None:
            return
        log.error("the upgrade is taken back: %s", failure.message)
        self._upgrade_failure = failure
        self._spec = msgspec.structs.replace(self._spec, config=self._older.config)
        self._roster.revision = self._older.revision

    def _carry_out(self, plan: RosterPlan) -> None:
        for name in plan.start:
            self._begin(self._start_keeper(self._keeper_spec(name)))
        for name in plan.end:
            if name in self._keepers:
                self._link.send(self._keepers[name], KeeperOrder(end=True))
        for name in plan.forget:
            self._keepers.pop(name, None)
            self._begin(self._forget_keeper(name))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _start_keeper(self, keeper: KeeperSpec) -> None:
        try:
            await self._ground.start(keeper)
        except (PenstockError, OSError) as error:
            log.error("the keeper of %s could not be started: %s", keeper.name, error)
            code = error.code if isinstance(error, PenstockError) else EngineUnavailable.code
            self._roster.fail_start(keeper.name, StartFailure(code, str(error)), self._awake)

    async def _forget_keeper(self, name: str) -> None:
        try:
            await self._ground.forget(name)
        except PenstockError as error:
            log.error("what %s had could not be given back: %s", name, error)

    def _keeper_spec(self, name: str) -> KeeperSpec:
        spec, revision = self._spec, self._roster.revision
        return KeeperSpec(
            name,
            spec.address,
            spec.secret,
            spec.folder,
            forks_of(spec.folder, revision),
            spec.config,
            revision,
            spec.host_command,
            spec.ground != LOCAL,
        )

    def _end(self, reason: str) -> None:
        if not self._ending:
            log.info("the fleet %s ends: %s", self._spec.name, reason)
        self._ending = True
        self._look()

    # -- messages out ------------------------------------------------------------------------------------------------

    def _update(self) -> DirectoryUpdate:
        if self._adopting:  # gateways go by what the steward before has told them
            return DirectoryUpdate(os.getpid(), socket.gethostname(), Directory(0, ()))
        scale = self._autoscaler.status(self._roster.wanted)
        return DirectoryUpdate(os.getpid(), socket.gethostname(), self._roster.directory(), self._roster.failure, scale)

    def _status(self) -> FleetStatus:
        directory = {info.name: info for info in self._roster.directory().replicas}
        members = tuple(_member(each, directory[name]) for name, each in self._roster.replicas.items())
        return FleetStatus(
            self._spec.name,
            os.getpid(),
            self._roster.wanted,
            self._roster.revision,
            self._gateways.names,
            members,
            self._upgrade_failure,
            self._autoscaler.status(self._roster.wanted),
            self._link.refused,
        )


def _member(replica: KeptReplica, info: ReplicaInfo) -> MemberStatus:
    return MemberStatus(info, replica.keeper, replica.revision, replica.in_flight, replica.restarts)


def main(folder: str) -> None:
    """Runs a steward, unless the fleet has one."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # a terminal or a service manager may send one to every process
        signal.signal(ending, signal.SIG_IGN)  # the gateway decides when to stop
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    with open(Path(folder) / "steward.lock", "w") as lock:
        line = sys.stdin.buffer.readline()
        if not line:  # the parent has ended before it sent the spec
            return shutil.rmtree(folder, ignore_errors=True)
        spec = msgspec.json.decode(line, type=FleetSpec)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # there is another one
        _run(spec)
        Path(spec.run_file).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    sys.stderr.flush()
    os._exit(0)  # threads that wait for a Ray cluster that is gone have no end


def _run(spec: FleetSpec) -> None:
    async def steward() -> None:
        await Steward(spec, make_ground).run()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(steward())


if __name__ == "__main__":
    main(sys.argv[1])
