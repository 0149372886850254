"""Sends control messages to all replicas of a fleet, and brings replicas that join to the state of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from penstock.errors import EngineUnavailable, PenstockError
from penstock.fleet.replica import Replica
from penstock.ipc.control_answers import ControlAnswers
from penstock.ipc.restoring import EngineSettings
from penstock.types import AdapterInfo, AdapterList, Event, Hello, MemoryUse, WeightState
from penstock.types.messages import (
    Control,
    DescribeWeights,
    ListAdapters,
    Pause,
    RegisterAdapter,
    Resume,
    UnregisterAdapter,
)

DIGEST_SECONDS = 0.5  # after a request for an adapter whose digest is not known, until replicas are asked for it


class FleetControl:
    """Sends control messages to the replicas that `ready` returns. `next_id` numbers messages."""

    def __init__(
        self,
        ready: Callable[[], list[Replica]],
        answers: ControlAnswers,
        settings: EngineSettings,
        next_id: Callable[[], int],
    ) -> None:
        self._ready = ready
        self._answers = answers
        self._settings = settings
        self._next_id = next_id
        self._paused: set[tuple[str, int]] = set()  # engines that this gateway paused, by name and epoch
        self._learning: asyncio.Task[None] | None = None  # the digests of adapters that requests have named

    def close(self) -> None:
        if self._learning is not None:
            self._learning.cancel()

    async def ask_all(self, message: Control[Any], replicas: Sequence[Replica]) -> Event:
        """Asks these replicas and those that join meanwhile, and returns one answer for all. Lost replicas do not
        count. If one refuses, the message takes effect nowhere."""
        asked, answers = list(replicas), list[Event | BaseException]()
        while rest := asked[len(answers) :]:
            answers += await asyncio.gather(*(self.ask(each, message) for each in rest), return_exceptions=True)
            asked += [each for each in self._ready() if each not in asked]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        refused = next((error for error in errors if not isinstance(error, EngineUnavailable)), None)
        events = {
            each: answer for each, answer in zip(asked, answers, strict=True) if not isinstance(answer, BaseException)
        }
        if refused is not None or not events:
            if isinstance(message, RegisterAdapter) and message.name not in self._settings.adapters:
                for replica in events:
                    replica.send(UnregisterAdapter(message.name, id=self._next_id()))
            raise refused or errors[0]
        return _together(list(events.values()))

    async def ask(self, replica: Replica, message: Control[Any]) -> Event:
        """Asks one replica, and remembers a pause at once: the replica may be lost before it answers."""
        key = replica.name, replica.info.epoch
        if isinstance(message, Pause):
            self._paused.add(key)
        event = await self._answers.ask(replica, message._replace(id=self._next_id()))
        if isinstance(message, Resume):
            self._paused.discard(key)
        return event

    async def update(self, replica: Replica, hello: Hello, *, first: bool) -> None:
        """Brings a replica to the state of the others. The weights of the `first` one are the fleet's."""
        settings = self._settings
        told: tuple[object, ...] = ()
        while told != (told := self._told()):  # the others have changed meanwhile
            has = await self.ask(replica, DescribeWeights())
            assert isinstance(has, WeightState)
            if first:
                settings.weights = has
            if has.paused and not settings.weights.paused and (replica.name, replica.info.epoch) in self._paused:
                await self.ask(replica, Resume())  # it was not there when the others were resumed
            same = has._replace(seq=0) == settings.weights._replace(seq=0)
            if changes := settings.missing(hello, WeightState() if same else settings.weights):
                await changes.tell(lambda message: self.ask(replica, message))

    def _told(self) -> tuple[object, ...]:
        settings = self._settings
        return settings.weights._replace(seq=0), dict(settings.adapters), set(settings.forgotten)

    def learn_digests(self) -> None:
        """Asks replicas soon for the digests of adapters: these are part of the salts of blocks."""
        if self._learning is None:
            self._learning = asyncio.create_task(self._learn_digests())

    async def _learn_digests(self) -> None:
        await asyncio.sleep(DIGEST_SECONDS)
        adapters = self._settings.adapters
        for replica in self._ready():
            if all(info.digest for info in adapters.values()):
                break
            with suppress(PenstockError):
                listed = await self.ask(replica, ListAdapters())
                assert isinstance(listed, AdapterList)
                for info in listed.adapters:
                    if info.digest and _unloaded(info) == _unloaded(adapters.get(info.name)):
                        adapters[info.name] = info
        self._learning = None


def _unloaded(info: AdapterInfo | None) -> AdapterInfo | None:
    return None if info is None else info._replace(digest="", loaded=False)


def _together(events: Sequence[Event]) -> Event:
    """Merges the answers of all replicas: memory use is added up, everything else is the same."""
    first = events[0]
    if isinstance(first, MemoryUse):
        uses = [event for event in events if isinstance(event, MemoryUse)]
        return MemoryUse(first.seq, sum(use.device for use in uses), sum(use.host for use in uses))
    return first
