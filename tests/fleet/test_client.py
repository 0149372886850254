"""A gateway's client over real engine processes: answers, routes, control messages, and who may join."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing
from typing import Any

import pytest
import zmq

from penstock.backend.fake import continuation
from penstock.errors import EngineUnavailable, NotSupported
from penstock.fleet.client import FleetClient
from penstock.fleet.directory import ReplicaInfo, ReplicaState
from penstock.fleet.replica import Credentials, Replica
from penstock.types import Aborted, Event, Finished, Request, SamplingParams, Tokens
from penstock.types.messages import DescribeWeights, FlushCache, Pause, RegisterAdapter, Resume, Sleep
from tests.engine.test_ipc import run
from tests.fleet.fake_host import LIMITS, VOCAB
from tests.fleet.fleets import Keepers, fleet, until_ready


def request(client: Any, prompt: list[int], max_tokens: int = 40, **more: Any) -> Request:
    return Request(client.next_id(), tuple(prompt), SamplingParams(), max_tokens, **more)


async def answer(client: Any, prompt: list[int], max_tokens: int = 40) -> list[Event]:
    return [event async for events in client.submit(request(client, prompt, max_tokens)) for event in events]


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.tokens]


def check(events: list[Event], prompt: list[int], max_tokens: int = 40) -> None:
    assert tokens_of(events) == continuation(prompt, max_tokens, VOCAB)
    assert isinstance(events[-1], Finished)


def test_requests_are_spread_and_answered() -> None:
    async def scenario() -> None:
        async with fleet(3) as (client, _):
            await until_ready(client, 3)
            prompts = [[1, 2, 3, number] for number in range(24)]
            answers = await asyncio.gather(*(answer(client, prompt) for prompt in prompts))
            for events, prompt in zip(answers, prompts, strict=True):
                check(events, prompt)
            assert client.hello is not None
            assert client.hello.limits == LIMITS
            assert client.in_flight == 0
            stats = client.stats
            assert stats.generated_tokens == 24 * 40
            assert stats.running == 0
            assert stats.prompt_tokens == 24 * 4
            assert sum(latest.prompt_tokens > 0 for _, latest in client._lifecycle.totals._latest.values()) == 3

    run(scenario())


def test_a_prompt_goes_where_its_beginning_is() -> None:
    async def scenario() -> None:
        async with fleet(3) as (client, _):
            await until_ready(client, 3)
            prefix = [7 * number % VOCAB for number in range(256)]
            check(await answer(client, [*prefix, 1], 4), [*prefix, 1], 4)
            for last in range(2, 8):
                events = await answer(client, [*prefix, last], 4)
                check(events, [*prefix, last], 4)
                assert isinstance(events[0], Tokens)
                assert events[0].cached == 256
            client.tell(FlushCache())
            await client.ask(DescribeWeights())
            events = await answer(client, [*prefix, 9], 4)
            assert isinstance(events[0], Tokens)
            assert events[0].cached == 0

    run(scenario())


def test_a_gateway_that_comes_later_knows_what_replicas_hold() -> None:
    async def scenario() -> None:
        async with fleet(3) as (client, keepers):
            await until_ready(client, 3)
            prefix = [11 * number % VOCAB for number in range(256)]
            await answer(client, [*prefix, 1], 4)
            other = FleetClient(Follower(keepers), name="other")
            await other.start()
            await until_ready(other, 3)
            assert other._router.view is not None
            assert all(other._router.view._index.is_live(number) for number in range(3))
            events = await answer(other, [*prefix, 2], 4)
            assert isinstance(events[0], Tokens)
            assert events[0].cached == 256
            for view in (client._router.view, other._router.view):  # each hears of it by a message of its own
                assert view is not None
                await until(lambda router=view._router: router.gateways == 2)
            await other.close()
            check(await answer(client, [5, 6], 8), [5, 6], 8)

    run(scenario())


class Follower:
    """Tells a second gateway of the fleet, and does not end it."""

    def __init__(self, keepers: Keepers) -> None:
        self._keepers = keepers
        self.secret = keepers.secret

    async def start(self) -> Any:
        return self._keepers._directory()

    async def changes(self) -> Any:
        await asyncio.Event().wait()
        yield

    async def close(self) -> None: ...


def test_two_gateways_with_the_same_ids_do_not_meet() -> None:
    async def scenario() -> None:
        async with fleet(1) as (client, keepers):
            other = FleetClient(Follower(keepers), name="other")
            await other.start()
            mine, theirs = await asyncio.gather(answer(client, [1, 2], 100), answer(other, [3, 4], 100))
            check(mine, [1, 2], 100)
            check(theirs, [3, 4], 100)
            await other.close()

    run(scenario())


def test_leaving_and_aborting_free_the_replica() -> None:
    async def scenario() -> None:
        async with fleet(2) as (client, _):
            async with aclosing(client.submit(request(client, [1, 2], 4000))) as events:
                async for _ in events:
                    break
            aborted = request(client, [3, 4], 4000)
            told: list[Event] = []
            async for events_of_step in client.submit(aborted):
                told += events_of_step
                client.abort(aborted.id)
            assert isinstance(told[-1], Aborted)
            while client.stats.running:
                await asyncio.sleep(0.005)

    run(scenario())


def test_a_gateway_that_has_gone_loses_its_requests() -> None:
    async def scenario() -> None:
        async with fleet(1) as (client, keepers):
            other = FleetClient(Follower(keepers), name="other")
            await other.start()
            stream = other.submit(request(other, [1, 2], 4000))
            await anext(stream)
            await until(lambda: client.stats.running == 1)
            await other.close()
            await until(lambda: client.stats.running == 0)

    run(scenario())


async def until(met: Any) -> None:
    while not met():
        await asyncio.sleep(0.005)


def test_control_messages_reach_all_replicas_and_those_that_come_later() -> None:
    async def scenario() -> None:
        async with fleet(2) as (client, keepers):
            await until_ready(client, 2)
            assert (await client.ask(Pause())).paused
            asked = asyncio.create_task(answer(client, [1, 2], 4))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asked), 0.1)
            keepers.kill("fake-0")
            await until(lambda: client.restarts == 1)
            others = [asyncio.create_task(answer(client, [1, 2, number], 4)) for number in range(6)]
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in others)
            assert not (await client.ask(Resume())).paused
            check(await asked, [1, 2], 4)
            for number, task in enumerate(others):
                check(await task, [1, 2, number], 4)
            use = await client.ask(Sleep())
            assert use.host == 2000  # of both
            with pytest.raises(NotSupported):
                await client.ask(RegisterAdapter("a", "nowhere"))

    run(scenario())


def test_a_replica_that_was_away_when_others_were_resumed_goes_on() -> None:
    async def scenario() -> None:
        async with fleet(2) as (client, keepers):
            await until_ready(client, 2)
            assert (await client.ask(Pause())).paused
            keepers.kill("fake-0", signal.SIGSTOP)
            await until(lambda: len(client._members.ready()) == 1)
            assert not (await client.ask(Resume())).paused
            keepers.kill("fake-0", signal.SIGCONT)
            await until_ready(client, 2)
            assert client.restarts == 0
            answers = await asyncio.gather(*(answer(client, [1, 2, number], 4) for number in range(8)))
            for number, events in enumerate(answers):
                check(events, [1, 2, number], 4)

    run(scenario())


def test_a_replica_that_joins_while_others_are_resumed_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with fleet(2) as (client, keepers):
            await until_ready(client, 2)
            await client.ask(Pause())
            ask, paused = client._streams.controls.ask, []

            async def resume_after_pause(engine: Any, message: Any) -> Event:
                event = await ask(engine, message)
                if isinstance(message, Pause):
                    paused.append(message)
                    await client.ask(Resume())
                return event

            monkeypatch.setattr(client._streams.controls, "ask", resume_after_pause)
            keepers.kill("fake-0")
            await until(lambda: client.restarts == 1)
            assert len(paused) == 1
            answers = await asyncio.gather(*(answer(client, [1, 2, number], 4) for number in range(8)))
            for number, events in enumerate(answers):
                check(events, [1, 2, number], 4)

    run(scenario())


def test_a_replica_that_ends_for_good_leaves_its_counts_and_its_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def scenario() -> None:
        async with fleet(2) as (client, keepers):
            await until_ready(client, 2)
            await asyncio.gather(*(answer(client, [1, 2, number], 10) for number in range(8)))
            for number in range(2, 5):
                gone = f"fake-{number - 1}"
                await keepers.replace(gone, f"fake-{number}")
                await until_ready(client, 2)
                await until(lambda gone=gone: client._members.number_of(gone) is None)
                check(await answer(client, [3, number], 10), [3, number], 10)
            assert max(client._members._numbers.values()) <= 2  # of five: the next is there before one goes
            kept = client._lifecycle
            assert len(kept.totals._latest) == len(kept.tally._replicas) == len(kept._lives) == 2
            assert client.stats.generated_tokens == 8 * 10 + 3 * 10

    run(scenario())
    told = [record.levelname for record in caplog.records if "go on elsewhere" in record.message]
    assert told == ["INFO"] * 3  # nothing is wrong with one that was told to end


def test_a_replica_of_another_model_is_left_out() -> None:
    async def scenario() -> None:
        async with fleet(2, models=("fake", "other")) as (client, _):
            await until(lambda: any("block_size" in info.reason for info in client.replicas))
            states = {info.name: info.state for info in client.replicas}
            assert sorted(states.values()) == [ReplicaState.READY, ReplicaState.STARTING]  # the first to join stays
            for number in range(8):
                check(await answer(client, [number], 4), [number], 4)

    run(scenario())


def test_who_does_not_know_the_secret_is_refused() -> None:
    async def scenario() -> None:
        async with fleet(1) as (_, keepers):
            follower = Follower(keepers)
            follower.secret = "a guess"
            stranger = FleetClient(follower, name="stranger")
            with pytest.raises(EngineUnavailable, match="wrong_secret"):
                await asyncio.wait_for(stranger.start(), 10)
            await stranger.close()

    run(scenario())


def test_a_connection_that_is_given_up_while_it_is_made_is_closed() -> None:
    async def scenario() -> None:
        context: Any = zmq.Context()
        with context.socket(zmq.ROUTER) as silent:
            port = silent.bind_to_random_port("tcp://127.0.0.1")
            info = ReplicaInfo("toy-0", f"tcp://127.0.0.1:{port}")
            replica = Replica(info, 0, Credentials("gateway", "secret"), *(None, None))  # type: ignore[arg-type]
            joining = asyncio.create_task(replica.join(context))
            await asyncio.sleep(0)
            joining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await joining
            assert replica._socket.socket.closed
            assert replica._monitor.socket.closed
        context.destroy(linger=0)

    run(scenario())


def test_another_protocol_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with fleet(1) as (_, keepers):
            from penstock.ipc import shared_wire

            monkeypatch.setattr(
                "penstock.fleet.replica.Join", lambda secret, client: shared_wire.Join(secret, client, 9, 8)
            )
            newer = FleetClient(Follower(keepers), name="newer")
            with pytest.raises(EngineUnavailable, match="speaks protocol 1 and the client 8 to 9"):
                await asyncio.wait_for(newer.start(), 10)
            await newer.close()

    run(scenario())
