"""Joins the engines that a fleet's directory lists, and joins them again when a connection was lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from itertools import count
from typing import Protocol

import zmq

from penstock.errors import EngineUnavailable, PenstockError
from penstock.fleet.directory import Death, Directory, DirectorySource, ReplicaInfo, ReplicaState
from penstock.fleet.replica import Credentials, Replica, ReplicaOwner

log = logging.getLogger(__name__)

JOINABLE = (ReplicaState.READY, ReplicaState.DRAINING)
NOT_JOINED, UNSUITED = "not_joined", "unsuited"  # why a replica is not used: no connection, or another model
PAUSES = (0.2, 0.2, 0.5, 1.0, 2.0)  # seconds before a replica that was lost, or could not be joined, is tried again


class MemberOwner(ReplicaOwner, Protocol):
    """Handles replicas that join, leave and die."""

    async def welcome(self, replica: Replica) -> None:
        """Prepares an engine that was joined for requests; raises PenstockError if it can be sent none."""

    def admit(self, replica: Replica) -> None:
        """Sends requests to a replica from now on, or again."""

    def shut_out(self, replica: Replica) -> None:
        """Sends a replica no new requests."""

    def move_from(self, replica: Replica) -> None:
        """Moves the requests of a replica that is about to end."""

    def lose(self, replica: Replica, reason: str, *, innocent: bool) -> None:
        """Handles the loss of a replica. It is `innocent` if it was asked to end."""

    def forget_replica(self, name: str, number: int) -> None:
        """Forgets a replica that has ended for good. Another one may get its number."""

    def note_refusal(self, replica: str, reason: str) -> None:
        """Counts a failed attempt to join a replica."""

    def explain(self, death: Death) -> None:
        """Takes the cause of an engine's death."""

    def give_up(self, reason: str) -> None:
        """Handles that no replica is left, and none is being started."""


class Membership:
    """Follows the directory. A replica is joined once it is ready there, in each of its lives."""

    def __init__(self, source: DirectorySource, credentials: Callable[[], Credentials], owner: MemberOwner) -> None:
        self._source = source
        self._credentials = credentials
        self._owner = owner
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._directory = Directory(0, ())
        self._replicas: dict[str, Replica] = {}  # joined replicas, by name
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._sought: dict[str, int] = {}  # the epochs that are being joined, or were
        self._reasons: dict[str, str] = {}  # why replicas could not be joined
        self._tried = asyncio.Event()  # a replica has joined, or could not
        self._numbers: dict[str, int] = {}
        self._told: set[tuple[str, int]] = set()  # deaths
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the first replica has joined; raises what keeps all from joining."""
        self._apply(await self._source.start())
        while not self.ready() and self._joining and len(self._reasons) < len(self._directory.replicas):
            self._tried.clear()
            await self._tried.wait()
        if not self.ready():
            reasons = "; ".join(self._reasons.values()) or "there is none"
            raise EngineUnavailable(f"no replica of the fleet can be used: {reasons}")
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        tasks = [*self._joining.values(), *([self._following] if self._following else ())]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for replica in self._replicas.values():
            replica.leave()
        self._replicas.clear()
        await self._source.close()
        self._context.destroy(linger=100)

    def ready(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.ready]

    def number_of(self, name: str) -> int | None:
        """Returns the number that stands for a replica in the router; None: it has never joined."""
        return self._numbers.get(name)

    def infos(self) -> Iterator[ReplicaInfo]:
        for info in self._directory.replicas:
            replica = self._replicas.get(info.name)
            if info.state in JOINABLE and (replica is None or not replica.ready):
                reason = self._reasons.get(info.name, "this gateway is joining it")
                info = info._replace(state=ReplicaState.STARTING, reason=reason)
            yield info

    def _lose(self, replica: Replica, reason: str, innocent: bool) -> None:
        """Handles the loss of a connection. If the directory still has that engine, it is joined again."""
        self._owner.lose(replica, reason, innocent=innocent)
        if self._replicas.get(replica.name) is replica:
            del self._replicas[replica.name]
            info = next((info for info in self._directory.replicas if info.name == replica.name), None)
            if info is not None and info.state in JOINABLE and self._following is not None:
                self._begin(info, again=True)
            self._look_for_others()

    # -- following the directory ---------------------------------------------------------------------------------

    async def _follow(self) -> None:
        async for directory in self._source.changes():
            self._apply(directory)

    def _apply(self, directory: Directory) -> None:
        self._directory = directory
        for death in directory.deaths:
            if (death.replica, death.epoch) not in self._told:
                self._told.add((death.replica, death.epoch))
                self._owner.explain(death)
        for info in directory.replicas:
            self._note(info)
        for name, task in self._joining.items():
            if self._wanted(name) is None:
                task.cancel()  # who has ended does not answer, and others are told that none is left
        self._forget_ended()
        self._look_for_others()

    def _forget_ended(self) -> None:
        """Drops replicas that left the directory: their successors have other names."""
        known = {info.name for info in self._directory.replicas} | self._replicas.keys() | self._joining.keys()
        for name in self._numbers.keys() - known:
            self._sought.pop(name, None)
            self._reasons.pop(name, None)
            self._owner.forget_replica(name, self._numbers.pop(name))

    def _number(self, name: str) -> int:
        """Returns the number of a replica: the least that no other has, since tables are as wide as the highest."""
        if name not in self._numbers:
            taken = set(self._numbers.values())
            self._numbers[name] = next(number for number in count() if number not in taken)
        return self._numbers[name]

    def _look_for_others(self) -> None:
        infos = self._directory.replicas
        if not self._joining and not self.ready() and all(info.state is ReplicaState.ENDED for info in infos):
            reasons = "; ".join(info.reason for info in infos if info.reason)
            self._owner.give_up(f"no replica of the fleet is left: {reasons or 'all were ended'}")

    def _note(self, info: ReplicaInfo) -> None:
        replica = self._replicas.get(info.name)
        if replica is None or replica.info.epoch != info.epoch:
            under_way = info.name in self._joining and self._sought[info.name] == info.epoch
            if info.state in JOINABLE and info.address and not under_way:
                self._begin(info)
            return
        before, replica.info = replica.info.state, info
        if info.state is ReplicaState.ENDED:
            self._owner.move_from(replica)
        elif info.state is ReplicaState.DRAINING:
            self._owner.shut_out(replica)
        elif before is ReplicaState.DRAINING and replica.ready:
            self._owner.admit(replica)

    def _begin(self, info: ReplicaInfo, *, again: bool = False) -> None:
        if (old := self._joining.get(info.name)) is not None:
            old.cancel()
        task = self._joining[info.name] = asyncio.create_task(self._join(info.name, again))
        self._sought[info.name] = info.epoch
        task.add_done_callback(lambda _: self._stop_joining(info.name, task))

    def _stop_joining(self, name: str, task: asyncio.Task[None]) -> None:
        if self._joining.get(name) is task:
            del self._joining[name]
            self._forget_ended()
            self._look_for_others()

    async def _join(self, name: str, again: bool) -> None:
        """Joins a replica as soon as that works, as long as the directory has it."""
        failures = int(again)
        while True:
            if failures:
                await asyncio.sleep(PAUSES[min(failures, len(PAUSES)) - 1])
            if (info := self._wanted(name)) is None:
                return
            try:
                return await self._try_to_join(info)
            except PenstockError as error:
                failures += 1
                if self._reasons.get(name) != str(error):
                    log.error("%s", error)
                self._reasons[name] = str(error)
            finally:
                self._tried.set()

    async def _try_to_join(self, info: ReplicaInfo) -> None:
        replica = Replica(info, self._number(info.name), self._credentials(), self._owner, self._lose)
        try:
            await replica.join(self._context)
        except PenstockError:
            self._owner.note_refusal(info.name, NOT_JOINED)
            raise
        try:
            await self._owner.welcome(replica)
        except BaseException as error:
            replica.leave()
            if isinstance(error, PenstockError):
                self._owner.note_refusal(info.name, UNSUITED)
            raise
        old, self._replicas[info.name] = self._replicas.get(info.name), replica
        if old is not None:
            old.close()
            self._owner.lose(old, f"{info.name} was started again", innocent=False)
        self._reasons.pop(info.name, None)
        replica.ready = True
        self._owner.admit(replica)
        for now in self._directory.replicas:
            if now.name == info.name and now.epoch == info.epoch:
                self._note(now)

    def _wanted(self, name: str) -> ReplicaInfo | None:
        for info in self._directory.replicas:
            known = self._replicas.get(name)
            if info.name == name and info.state in JOINABLE and info.address:
                return None if known is not None and known.info.epoch == info.epoch else info
        return None
