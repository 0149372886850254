"""Decides which replicas a steward starts, drains and ends. It reads no clock and does no I/O: times are seconds of a
clock that its caller names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import EngineUnavailable
from penstock.fleet.directory import Death, Directory, ReplicaInfo, ReplicaState
from penstock.fleet.steward_wire import KeeperReport, StartFailure

SILENT = 5.0  # seconds after which a keeper that says nothing is lost
FIRST_WORD = 30.0  # seconds that a keeper has for its first report
IDLE = 0.5  # seconds that a drained replica must have had nothing to do
SHOWN = 5.0  # seconds that a replica which has ended stays in the directory
DEATHS = 32  # deaths remembered
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before the next keeper is started, while keepers cannot be
HOPELESS = 2  # attempts after which an upgrade is taken back


@dataclass(slots=True)
class KeptReplica:
    """The state of one replica."""

    info: ReplicaInfo
    revision: int
    heard: float  # when its keeper reported last, or was started
    reported: bool = False
    keeper: int = 0
    in_flight: int = 0
    restarts: int = 0
    attempts: int = 0
    failure: StartFailure | None = None
    draining_since: float | None = None
    drained_version: int = 0  # the first directory version that shows it draining
    idle_since: float | None = None
    ending: bool = False
    ended: float | None = None
    orphaned: bool = False  # its keeper is lost, and its engine may go on

    @property
    def state(self) -> ReplicaState:
        if self.ended is not None:
            return ReplicaState.ENDED
        return ReplicaState.DRAINING if self.leaving and self.info.address else self.info.state

    @property
    def leaving(self) -> bool:
        return self.draining_since is not None or self.ended is not None

    @property
    def ready(self) -> bool:
        return self.state is ReplicaState.READY


class RosterPlan(NamedTuple):
    """Lists the steward's next actions."""

    start: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()


class Roster:
    """Holds all replicas of a fleet, by name. A replica that is replaced gets a new name."""

    def __init__(self, fleet: str, wanted: int, *, revision: int = 0, next_number: int = 0, version: int = 0) -> None:
        self.wanted = wanted
        self.revision = revision
        self.next_number = next_number
        self.replicas: dict[str, KeptReplica] = {}
        self._fleet = fleet
        self._version = version
        self._told: tuple[ReplicaInfo, ...] = ()
        self._not_started = 0  # keepers, in a row
        self._next_start = 0.0  # not before this time
        self._start_failure: StartFailure | None = None  # the last failure
        self._deaths: tuple[Death, ...] = ()
        self._told_deaths: tuple[Death, ...] = ()

    # -- messages in -------------------------------------------------------------------------------------------------

    def take(self, report: KeeperReport, now: float) -> KeptReplica:
        """Takes a keeper's report; the keeper may be unknown."""
        name = report.replica.name
        replica = self.replicas.get(name)
        if replica is None:
            replica = self.replicas[name] = KeptReplica(report.replica, report.revision, now)
            self.next_number = max(self.next_number, number_of(name) + 1)
            self.replicas = {name: self.replicas[name] for name in sorted(self.replicas, key=number_of)}
        if report.replica.state is ReplicaState.READY:
            self._not_started, self._start_failure = 0, None
        if replica.orphaned:
            replica.orphaned, replica.draining_since = False, None
        replica.info, replica.heard, replica.reported = report.replica, now, True
        replica.keeper, replica.revision, replica.in_flight = report.keeper, report.revision, report.in_flight
        replica.restarts, replica.attempts, replica.failure = report.restarts, report.attempts, report.failure
        if report.in_flight:
            replica.idle_since = None
        elif replica.idle_since is None:
            replica.idle_since = now
        if report.replica.state is ReplicaState.ENDED and replica.ended is None:
            replica.ended = now
        self._remember(report.deaths)
        return replica

    def _remember(self, deaths: Iterable[Death]) -> None:
        new = tuple(death for death in deaths if death not in self._deaths)
        self._deaths = (*self._deaths, *new)[-DEATHS:]

    def lose_keeper(self, name: str, now: float, reason: str) -> None:
        """Notes a lost keeper. An engine that was ready continues without one and is drained."""
        replica = self.replicas.get(name)
        if replica is None or replica.ended is not None or replica.orphaned:
            return
        if replica.info.address and not replica.ending:
            replica.orphaned = True
            replica.info = replica.info._replace(reason=reason)
            self._drain(replica, now)
        else:
            replica.info, replica.ended = replica.info._replace(reason=reason), now
            if not replica.ending:
                self._pause(StartFailure(EngineUnavailable.code, f"{name}: {reason}"), now)

    def fail_start(self, name: str, failure: StartFailure, now: float) -> None:
        self.lose_keeper(name, now, failure.message)
        self._start_failure = failure

    def refuse(self, name: str, failure: StartFailure) -> None:
        """Notes that the reports of a new keeper cannot be read, if there is one of this name. Starting another like it
        is hopeless."""
        if (replica := self.replicas.get(name)) is not None and not replica.reported:
            replica.failure, replica.attempts = failure, HOPELESS
            replica.info = replica.info._replace(reason=failure.message)

    def _pause(self, failure: StartFailure, now: float) -> None:
        self._start_failure = failure
        self._next_start = max(self._next_start, now + PAUSES[min(self._not_started, len(PAUSES) - 1)])
        self._not_started += 1

    # -- wishes ------------------------------------------------------------------------------------------------------

    def drain(self, name: str, now: float) -> None:
        """Makes a replica leave for good: the fleet shrinks by one."""
        if not self.replicas[name].leaving:
            self.wanted = max(self.wanted - 1, 0)
            self._drain(self.replicas[name], now)

    def _drain(self, replica: KeptReplica, now: float) -> None:
        if replica.draining_since is None:
            replica.draining_since, replica.idle_since = now, None
            replica.drained_version = self._version + 1

    def plan(self, now: float, drain_seconds: float, seen: int) -> RosterPlan:
        """Returns the next actions. `seen` is the directory version that all gateways have."""
        forget = self._look(now)
        for replica in self._surplus():
            self._drain(replica, now)
        end = [name for name, each in self.replicas.items() if self._drained(each, now, drain_seconds, seen)]
        for name in end:
            self._end(self.replicas[name], now)
        return RosterPlan(self._start(now), tuple(end), forget)

    def end_all(self, now: float) -> RosterPlan:
        self.wanted = 0
        end = [name for name, each in self.replicas.items() if not each.ending and each.ended is None]
        for name in end:
            self._end(self.replicas[name], now)
        return RosterPlan(end=tuple(end))

    def _end(self, replica: KeptReplica, now: float) -> None:
        self._drain(replica, now)
        replica.ending = True
        if replica.orphaned:  # without a keeper nobody gets the message; its engine exits without a gateway
            replica.ended = now

    def _look(self, now: float) -> tuple[str, ...]:
        """Notes silent keepers, and forgets ended replicas; returns their names."""
        forgotten = []
        for name, replica in list(self.replicas.items()):
            if replica.ended is not None and now - replica.ended > SHOWN:
                del self.replicas[name]
                forgotten.append(name)
            elif now - replica.heard > (SILENT if replica.reported else FIRST_WORD):
                self.lose_keeper(name, now, f"its keeper said nothing for {now - replica.heard:.0f} s")
        return tuple(forgotten)

    def _surplus(self) -> list[KeptReplica]:
        """Returns the replicas that have to leave: of an older revision, one at a time while the new ones are ready,
        then the newest of too many."""
        staying = [each for each in self.replicas.values() if not each.leaving]
        if len(staying) <= self.wanted:
            return []
        old = [each for each in staying if each.revision != self.revision]
        new = [each for each in staying if each.revision == self.revision]
        if not old:
            unready = sorted(staying, key=lambda each: not each.ready)
            return unready[self.wanted :]
        if len(staying) > self.wanted + 1:
            return sorted(old, key=lambda each: each.ready)[: len(staying) - self.wanted - 1]
        leaving = any(each.leaving and each.ended is None for each in self.replicas.values())
        return [] if leaving or not all(each.ready for each in new) else old[:1]

    def _drained(self, replica: KeptReplica, now: float, drain_seconds: float, seen: int) -> bool:
        if replica.draining_since is None or replica.ending or replica.ended is not None:
            return False
        if not replica.info.address or now - replica.draining_since > drain_seconds:
            return True
        idle = replica.idle_since is not None and now - replica.idle_since >= IDLE
        return idle and not replica.orphaned and seen >= replica.drained_version

    def _start(self, now: float) -> tuple[str, ...]:
        if now < self._next_start:
            return ()
        staying = [each for each in self.replicas.values() if not each.leaving]
        current = sum(each.revision == self.revision for each in staying)
        missing = max(self.wanted - len(staying), 0)
        if not missing and current < self.wanted and len(staying) == self.wanted:
            leaving = any(each.leaving and each.ended is None for each in self.replicas.values())
            missing = 0 if leaving or not all(each.ready for each in staying) else 1
        return tuple(self.add(now) for _ in range(missing))

    def add(self, now: float) -> str:
        name = f"{self._fleet}-{self.next_number}"
        self.next_number += 1
        self.replicas[name] = KeptReplica(ReplicaInfo(name), self.revision, now)
        return name

    # -- messages out ------------------------------------------------------------------------------------------------

    @property
    def hopeless_upgrade(self) -> StartFailure | None:
        new = [each for each in self.replicas.values() if each.revision == self.revision]
        if not any(each.revision != self.revision and not each.leaving for each in self.replicas.values()):
            return None
        return next((each.failure for each in new if each.failure and each.attempts >= HOPELESS), None)

    @property
    def failure(self) -> StartFailure | None:
        """Returns why no replica can start; None: one runs, or may start yet."""
        staying = [each for each in self.replicas.values() if not each.leaving]
        if any(each.failure is None for each in staying):
            return None
        return staying[0].failure if staying else self._start_failure

    def directory(self) -> Directory:
        """Returns all replicas. The version is a new one if anything has changed since the last call."""
        told = tuple(info_for_gateways(each) for each in self.replicas.values())
        if told != self._told or self._deaths != self._told_deaths:
            self._told, self._told_deaths = told, self._deaths
            self._version += 1
        return Directory(self._version, told, self._deaths)


def number_of(name: str) -> int:
    """Returns the number at the end of a replica's name; -1: there is none."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def info_for_gateways(replica: KeptReplica) -> ReplicaInfo:
    return replica.info._replace(state=replica.state)
