"""Replicas are killed, stopped, drained and restarted: every stream goes on elsewhere with the same tokens, and a
request that ends its engine does not end one after the other."""

from __future__ import annotations

import asyncio
import signal
import time
from random import Random
from typing import Any

import pytest

from penstock.fleet.client import FleetClient
from penstock.fleet.directory import ReplicaState
from penstock.types import Event, Failed, Finished, Tokens
from tests.engine.test_ipc import run
from tests.fleet.fake_host import POISON
from tests.fleet.fleets import Keepers, fleet, until_ready
from tests.fleet.test_client import Follower, answer, check, request, tokens_of, until

COUNT = 150
SEVERAL = 8  # events of a stream


async def begin(client: FleetClient, prompts: list[list[int]], count: int = COUNT) -> list[asyncio.Task[list[Event]]]:
    """Starts streams and returns them when all have got several tokens: what an engine says last may be lost with it,
    and one that it has not answered may be why it died."""
    begun = []

    async def follow(prompt: list[int]) -> list[Event]:
        events: list[Event] = []
        async for share in client.submit(request(client, prompt, count)):
            events += share
            if len(events) == SEVERAL:
                begun.append(prompt)
        return events

    tasks = [asyncio.create_task(follow(prompt)) for prompt in prompts]
    await until(lambda: len(begun) == len(prompts))
    return tasks


def engines_in_use(client: FleetClient) -> set[str]:
    return {stream.engine.name for stream in client._streams._streams.values() if stream.engine}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP], ids=lambda kind: kind.name)
def test_every_stream_goes_on_elsewhere(kind: signal.Signals) -> None:
    async def scenario() -> None:
        async with fleet(3) as (client, keepers):
            await until_ready(client, 3)
            prompts = [[1, 2, 3, number] for number in range(12)]
            tasks = await begin(client, prompts)
            assert engines_in_use(client) == {"fake-0", "fake-1", "fake-2"}
            keepers.kill("fake-1", kind)
            for prompt, task in zip(prompts, tasks, strict=True):
                check(await task, prompt, COUNT)
            if kind == signal.SIGSTOP:
                keepers.kill("fake-1", signal.SIGCONT)
            await until_ready(client, 3)
            assert client.restarts <= 1  # one that has stopped is killed if it does not go on soon
            check(await answer(client, [9]), [9])
            await until(lambda: client.stats.running == 0)  # also where it had stopped

    run(scenario())


def test_streams_wait_when_no_replica_is_left() -> None:
    async def scenario() -> None:
        async with fleet(2) as (client, keepers):
            await until_ready(client, 2)
            prompts = [[1, number] for number in range(6)]
            tasks = await begin(client, prompts)
            keepers.kill("fake-0")
            keepers.kill("fake-1")
            await until(lambda: client.state == "resuming")
            late = asyncio.create_task(answer(client, [7, 7]))
            for prompt, task in zip(prompts, tasks, strict=True):
                check(await task, prompt, COUNT)
            check(await late, [7, 7])

    run(scenario())


def test_requests_fail_when_no_replica_will_come() -> None:
    async def scenario() -> None:
        async with fleet(1, restart=False) as (client, keepers):
            (task,) = await begin(client, [[1, 2]], 4000)
            keepers.kill("fake-0")
            events = await task
            assert isinstance(events[-1], Failed)
            assert "it has died" in events[-1].message
            assert client.state == "failed"
            assert client.hello is None

    run(scenario())


def test_a_poisoned_request_ends_two_engines_and_no_more() -> None:
    async def scenario() -> None:
        async with fleet(3) as (client, _):
            await until_ready(client, 3)
            prompts = [[1, 2, 3, number] for number in range(6)]
            tasks = await begin(client, prompts, 600)
            poisoned = await answer(client, [POISON, 1])
            assert isinstance(poisoned[-1], Failed)
            assert poisoned[-1].code == "poisoned_request"
            for prompt, task in zip(prompts, tasks, strict=True):
                check(await task, prompt, 600)
            await until_ready(client, 3)
            assert client.restarts == 2
            again = await answer(client, [POISON, 1])
            assert isinstance(again[-1], Failed)
            assert client.restarts == 2

    run(scenario())


def test_new_requests_stay_away_from_a_trial() -> None:
    async def scenario() -> None:
        async with fleet(3) as (client, _):
            await until_ready(client, 3)
            prompts = [[5, 6, number] for number in range(8)]
            poisoned = asyncio.create_task(answer(client, [POISON, 2]))
            answers = await asyncio.gather(*(answer(client, prompt, 60) for prompt in prompts))
            for events, prompt in zip(answers, prompts, strict=True):
                check(events, prompt, 60)
            assert isinstance((await poisoned)[-1], Failed)
            assert client.restarts <= 3

    run(scenario())


class SecondGateway(Follower):
    """Is told of deaths, too."""

    def changes(self) -> Any:
        return self._keepers.changes()


def test_a_poisoned_request_is_found_beside_the_streams_of_another_gateway() -> None:
    async def scenario() -> None:
        async with fleet(3) as (client, keepers):
            other = FleetClient(SecondGateway(keepers), name="other")
            await other.start()
            await until_ready(client, 3)
            await until_ready(other, 3)
            prompts = [[1, 2, 3, number] for number in range(9)]
            tasks = await begin(other, prompts, 600)
            poisoned = await answer(client, [POISON, 3])
            assert isinstance(poisoned[-1], Failed)
            assert poisoned[-1].code == "poisoned_request"
            for prompt, task in zip(prompts, tasks, strict=True):
                check(await task, prompt, 600)
            await until_ready(client, 3)
            assert client.restarts <= 3
            await other.close()

    run(scenario())


def test_a_draining_replica_gets_nothing_new_and_hands_over_when_it_ends() -> None:
    async def scenario() -> None:
        async with fleet(2) as (client, keepers):
            await until_ready(client, 2)
            prompts = [[1, number] for number in range(8)]
            tasks = await begin(client, prompts, 400)
            assert engines_in_use(client) == {"fake-0", "fake-1"}
            keepers.drain("fake-0")
            await until(lambda: any(info.state is ReplicaState.DRAINING for info in client.replicas))
            new = await begin(client, [[2, number] for number in range(6)])
            placed = [stream for stream in client._streams._streams.values() if stream.so_far.prompt[0] == 2]
            assert {stream.engine.name for stream in placed} == {"fake-1"}  # type: ignore[union-attr]
            keepers.tell("fake-0", state=ReplicaState.ENDED)
            await until(lambda: "fake-0" not in engines_in_use(client))
            for prompt, task in zip(prompts, tasks, strict=True):
                check(await task, prompt, 400)
            for number, task in enumerate(new):
                check(await task, [2, number], COUNT)
            assert client.restarts == 0

    run(scenario())


def test_an_engine_that_is_asked_to_end_blames_nobody() -> None:
    async def scenario() -> None:
        async with fleet(2) as (client, keepers):
            await until_ready(client, 2)
            prompts = [[1, number] for number in range(8)]
            tasks = await begin(client, prompts)
            unanswered = [asyncio.create_task(answer(client, [3, number])) for number in range(4)]
            await asyncio.sleep(0)
            await keepers.engines["fake-0"].end(5)
            for prompt, task in zip(prompts, tasks, strict=True):
                check(await task, prompt, COUNT)
            for number, task in enumerate(unanswered):
                check(await task, [3, number])

    run(scenario())


def test_what_a_resumed_stream_reports() -> None:
    async def scenario() -> None:
        async with fleet(2) as (client, keepers):
            await until_ready(client, 2)
            (task,) = await begin(client, [[1, 2, 3]])
            killed = time.monotonic()
            keepers.kill(*engines_in_use(client))
            events = await task
            seconds = time.monotonic() - killed
            check(events, [1, 2, 3], COUNT)
            last = events[-1]
            assert isinstance(last, Finished)
            assert last.report is not None
            assert 0 < dict(last.report.waited)["restart"] < seconds
            assert {event.cached for event in events if isinstance(event, Tokens)} == {0}

    run(scenario())


@pytest.mark.parametrize("seed", range(2))
def test_random_deaths_change_no_token(seed: int) -> None:
    random = Random(seed)

    async def disturb(client: FleetClient, keepers: Keepers, done: asyncio.Event) -> None:
        while not done.is_set():
            await asyncio.sleep(random.uniform(0.05, 0.5))
            name = f"fake-{random.randrange(3)}"
            kind = random.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
            keepers.kill(name, kind)
            if kind == signal.SIGSTOP:
                asyncio.get_running_loop().call_later(random.uniform(0.2, 2.0), keepers.kill, name, signal.SIGCONT)

    async def ask(client: FleetClient, number: int) -> None:
        await asyncio.sleep(random.uniform(0, 2.0))
        length = random.randrange(4, 60)  # so that no token of an answer stands where POISON ends an engine
        prompt = [random.randrange(500) for _ in range(length)]
        count = random.randrange(1, 300)
        events = await answer(client, prompt, count)
        check(events, prompt, count)

    async def scenario() -> None:
        async with fleet(3) as (client, keepers):
            done = asyncio.Event()
            disturbing = asyncio.create_task(disturb(client, keepers, done))
            await asyncio.gather(*(ask(client, number) for number in range(40)))
            done.set()
            await disturbing
            for number in range(3):
                keepers.kill(f"fake-{number}", signal.SIGCONT)
            assert client.in_flight == 0

    run(scenario())


def test_tokens_of_a_step_are_told_once() -> None:
    """A stream that moves and moves back has each token once, in order."""

    async def scenario() -> Any:
        async with fleet(2) as (client, keepers):
            await until_ready(client, 2)
            (task,) = await begin(client, [[4, 5]], 500)
            for name in ("fake-0", "fake-1", "fake-0"):
                keepers.kill(name)
                await asyncio.sleep(0.3)
            events = await task
            assert len(tokens_of(events)) == 500
            check(events, [4, 5], 500)

    run(scenario())
