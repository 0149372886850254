"""Tests placements as values: a table of what a gateway decides for a request, without engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.fleet.directory import ReplicaInfo
from penstock.fleet.replica import Replica
from penstock.fleet.route import RoutingWeights
from penstock.fleet.router import TRIAL, FleetRouter
from penstock.fleet.split import SplitRule
from penstock.ipc.dispatch import Dispatch, Pull
from penstock.ipc.restoring import EngineSettings
from penstock.ipc.streams import RequestStreams
from penstock.types import AdapterInfo, AdapterUse, Limits, Request, SamplingParams, Stats, WeightState
from penstock.types.messages import Add, Message

LIMITS = Limits(vocab=100, max_len=1024, max_rows=2, step_tokens=64, block_size=16, num_blocks=64)
PROMPT = tuple(range(64))


class Hello:
    device = "cpu"


class Quiet(Replica):
    """Is a replica without a connection."""

    def __init__(self, number: int) -> None:
        self.info = ReplicaInfo(f"toy-{number}")
        self.number = number
        self.ready, self.draining = True, False
        self.hello: Any = Hello()
        self.inbox: list[Message] = []

    def send(self, message: Message) -> None:
        self.inbox.append(message)


class World:
    def __init__(self, replicas: int) -> None:
        self.settings = EngineSettings()
        self.learned = 0
        self.router = FleetRouter(RoutingWeights(pull=True), SplitRule(), self.settings, self._learn)
        self.streams = RequestStreams(self.router)
        self.view = self.router.begin(LIMITS, self.streams)
        self.replicas = [Quiet(number) for number in range(replicas)]
        for replica in self.replicas:
            self.router.admit(replica)

    def _learn(self) -> None:
        self.learned += 1

    def place(self, avoid: Any = None, source: Any = None, **fields: Any) -> Dispatch | None:
        return self.router.place(Request(1, PROMPT, SamplingParams(), 4, **fields), avoid, source)


def lost(world: World) -> Any:
    world.replicas[1].ready = False
    return world.place(source=world.replicas[1])


def updated(world: World) -> Any:
    world.settings.weights = WeightState(updates=1)
    return world.place(source=world.replicas[1])


CASES: dict[str, tuple[int, Callable[[World], Any], int | None, int | None]] = {
    # replicas, what is asked, number of the engine and of the replica that blocks come from
    "nobody is there": (0, lambda world: world.place(), None, None),
    "one is idle": (1, lambda world: world.place(), 0, None),
    "the only one is avoided": (1, lambda world: world.place(avoid=world.replicas[0]), None, None),
    "one is avoided": (2, lambda world: world.place(avoid=world.replicas[0]), 1, None),
    "moved": (2, lambda world: world.place(avoid=world.replicas[1], source=world.replicas[1]), 0, 1),
    "moved from one that is lost": (2, lost, None, None),
    "moved after an update of the weights": (2, updated, None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_placement_is_a_value(name: str) -> None:
    count, ask, engine, source = CASES[name]

    async def test() -> None:
        world = World(count)
        placed = ask(world)
        if count < 2 or engine is not None:
            assert (None if placed is None else placed.engine.number) == engine
        pull = None if placed is None else placed.pull
        assert (None if pull is None else pull.source.number) == source
        if placed is None:
            return
        assert (placed.why.replica, placed.why.resumed, placed.waited) == (placed.engine.name, False, 0.0)
        if pull is not None:
            assert pull == Pull(world.replicas[source or 0], "", 0, "cpu")
            assert placed.why.source == world.replicas[source or 0].name
        assert all(not replica.inbox for replica in world.replicas)  # nothing was sent

    asyncio.run(test())


def test_a_full_fleet_makes_requests_wait_and_sends_them_later() -> None:
    async def test() -> None:
        world = World(1)
        (replica,) = world.replicas
        busy = Stats(running=LIMITS.max_rows, waiting=8, uncached_tokens=4096)
        world.view.report(0, busy, 0)
        others = [asyncio.create_task(world.streams.run(request(number), lambda _: None)) for number in (1, 2)]
        await asyncio.sleep(0.02)
        assert [type(message) for message in replica.inbox] == [Add]  # a tenant's first request does not wait
        assert world.router.in_line == 1
        world.view.report(0, Stats(), 1)
        placements = world.streams.dispatcher.placings
        told: list[Any] = []
        placements[2] = told.append
        world.router.advance()
        assert world.router.in_line == 0
        assert len(replica.inbox) == 2
        (why,) = told
        assert why.waited >= 0.02
        for task in others:
            task.cancel()

    asyncio.run(test())


def request(id: int) -> Request:
    return Request(id, (*PROMPT, id), SamplingParams(), 4)


def test_a_trial_says_so_and_an_unknown_digest_is_asked_for() -> None:
    async def test() -> None:
        world = World(1)
        trial = world.router.trial(world.replicas[0])
        assert trial.why is not None
        assert TRIAL in trial.why.why
        world.settings.adapters["a"] = AdapterInfo("a", "/a", 1.0, 4)
        world.place(adapters=(AdapterUse("a"),))
        assert world.learned == 1

    asyncio.run(test())
