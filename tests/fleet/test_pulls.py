"""Replicas read blocks from each other: what one holds, what one computes for another, and what one leaves behind."""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import aclosing, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backend.fake import continuation
from penstock.cli.fleet_serve import ReplicaOptions, prefill_replicas, replica_range
from penstock.cli.framework.command import UsageError
from penstock.fleet import lifecycle
from penstock.fleet.client import FleetClient
from penstock.fleet.directory import ReplicaState
from penstock.fleet.ledger import Load
from penstock.fleet.recent_prompts import RecentPrompts
from penstock.fleet.split import PromptToSplit, SplitOptions, SplitRule, longest_step
from penstock.fleet.timing import EngineTiming
from penstock.ipc.dispatch import Pull
from penstock.ipc.launchers import SpawnLauncher
from penstock.ipc.placement import RequestPlacement
from penstock.types import Aborted, Claim, Event, Finished, Report, Request, SamplingParams, Tokens
from tests.engine.test_ipc import run, until
from tests.fleet.fleets import HOST, VOCAB, Keepers, fleet, until_ready

CARRYING = HOST.replace(
    "block_events=bool(config.listen)", "block_events=bool(config.listen), transfer=TransferOptions(b'fake', ('shm',))"
).replace("host(open)", "from penstock.engine.kv_transfer.peers import TransferOptions\nhost(open)")
# Fake engines compute faster than they read.
CARRYING = "from penstock.engine.kv_transfer import pulls\npulls.HARM = 1e6\n" + CARRYING
CARRYING = CARRYING.replace(
    "    backend.reserve_kv", "    limits = limits._replace(host_places=256)\n    backend.reserve_kv"
)
LAUNCHER = SpawnLauncher((sys.executable, "-c", CARRYING))
PREFIX = [7 * number % VOCAB for number in range(256)]


async def ask(client: FleetClient, prompt: list[int], tokens: int = 4, **more: Any) -> Report:
    """Answers a prompt, sees that the answer is right, and returns its report."""
    report, _ = await placed(client, prompt, tokens, **more)
    return report


async def placed(
    client: FleetClient, prompt: list[int], tokens: int = 4, **more: Any
) -> tuple[Report, RequestPlacement]:
    """Does the same, and returns where it was sent, too."""
    request = Request(client.next_id(), tuple(prompt), SamplingParams(), tokens, **more)
    placements: list[RequestPlacement] = []
    async with aclosing(client.submit(request)) as steps:
        client.when_placed(request.id, placements.append)
        events: list[Event] = [event async for events in steps for event in events]
    said = [token for event in events if isinstance(event, Tokens) for token in event.tokens]
    assert said == continuation(prompt, tokens, VOCAB)
    assert isinstance(events[-1], Finished)
    assert events[-1].report is not None
    return events[-1].report, placements[-1]


def from_peers(report: Report) -> int:
    return dict(report.reused).get("peer", 0)


def steer(client: FleetClient, name: str) -> None:
    """Has one replica answer what comes next."""
    for replica in client._members.ready():
        (client._router.view.open if replica.name == name else client._router.view.shut)(replica.number)


def source(client: FleetClient, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Has blocks come from one replica."""
    [replica] = [each for each in client._members.ready() if each.name == name]

    def pull(reader: Any, route: Any, request: Any, salt: str, _: Any) -> Pull:
        return Pull(replica, salt, 0, reader.hello.device)

    monkeypatch.setattr(client._router, "_pull", pull)


def test_a_prompt_that_another_replica_holds_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with fleet(2, launcher=LAUNCHER) as (client, _):
            await until_ready(client, 2)
            steer(client, "fake-0")
            await ask(client, [*PREFIX, 1])
            steer(client, "fake-1")
            source(client, monkeypatch, "fake-0")
            report, placement = await placed(client, [*PREFIX, 2])
            assert from_peers(report) == 256
            assert (placement.replica, placement.source, placement.computing) == ("fake-1", "fake-0", "")
            assert client.stats.peers.pulled_blocks == 16
            assert client._streams.pulls.counts == {"offered": 1}
            assert from_peers(await ask(client, [5, *PREFIX])) == 0  # nobody has that
            assert client._streams.pulls.counts == {"offered": 1, "not_offered": 1}

    run(scenario())


def test_a_source_that_dies_costs_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with fleet(2, launcher=LAUNCHER, restart=False) as (client, keepers):
            await until_ready(client, 2)
            steer(client, "fake-0")
            await ask(client, [*PREFIX, 1])
            steer(client, "fake-1")
            source(client, monkeypatch, "fake-0")
            keepers.kill("fake-0", 19)  # stopped: it does not answer
            asked = asyncio.create_task(ask(client, [*PREFIX, 2]))
            await asyncio.sleep(0.1)
            assert not asked.done()
            keepers.kill("fake-0")
            assert from_peers(await asked) == 0
            assert client._streams.pulls.counts == {"not_offered": 1}

    run(scenario())


def test_a_request_that_waits_for_blocks_can_be_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with fleet(2, launcher=LAUNCHER) as (client, keepers):
            await until_ready(client, 2)
            steer(client, "fake-1")
            source(client, monkeypatch, "fake-0")
            keepers.kill("fake-0", 19)
            request = Request(client.next_id(), tuple(PREFIX), SamplingParams(), 4)
            async with aclosing(client.submit(request)) as stream:
                first = asyncio.create_task(anext(stream))
                await asyncio.sleep(0.05)
                client.abort(request.id)
                assert await first == [Aborted(request.id)]
            async with aclosing(client.submit(request._replace(id=client.next_id()))) as stream:
                left = asyncio.create_task(anext(stream))
                await asyncio.sleep(0.05)
                left.cancel()
                with suppress(asyncio.CancelledError):
                    await left
            await until(lambda: client.in_flight == 0)
            keepers.kill("fake-0", 18)

    run(scenario())


@pytest.mark.parametrize("state", [ReplicaState.DRAINING, ReplicaState.ENDED])
def test_streams_take_their_blocks_with_them(state: ReplicaState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "HAND_OVER_SECONDS", 0.05)

    async def scenario() -> None:
        async with fleet(2, launcher=LAUNCHER) as (client, keepers):
            await until_ready(client, 2)
            steer(client, "fake-0")
            asked = [asyncio.create_task(ask(client, [*PREFIX, number], 400)) for number in range(4)]
            while client.stats.generated_tokens < 4 * 50:
                await asyncio.sleep(0.005)
            steer(client, "fake-1")
            keepers.tell("fake-0", state=state)
            await asyncio.gather(*asked)
            peers = client.stats.peers
            assert peers.pulls >= 1
            assert peers.pulled_blocks >= 16 + 3  # the prefix, once, and what was generated
            assert client._streams.pulls.counts["offered"] == 4

    run(scenario())


def test_a_new_replica_reads_what_others_hold() -> None:
    async def scenario() -> None:
        async with fleet(2, launcher=LAUNCHER) as (client, keepers):
            await until_ready(client, 2)
            steer(client, "fake-0")
            await ask(client, [*PREFIX, 1])
            await ask(client, [3, *PREFIX])
            await ask(client, [1, 2, 3])
            keepers.kill("fake-1")
            while client._streams.pulls.counts["warmed"] < 2 or client.stats.peers.pulls < 2:
                await asyncio.sleep(0.01)
            steer(client, "fake-1")
            assert (await ask(client, [*PREFIX, 5])).reused == (("device", 256),)
            assert (await ask(client, [3, *PREFIX, 5])).cached == 256
            assert client.stats.peers.failures == ()

    run(scenario())


def test_the_last_prompts_that_differ_are_remembered() -> None:
    recent = RecentPrompts()
    for number in range(40):
        prompt = (number % 36, *range(300), number)
        recent.note(Request(number, prompt, SamplingParams(), 4), "")
    recent.note(Request(50, (1, 2), SamplingParams(), 4), "")
    recent.note(Request(51, tuple(range(300)), SamplingParams(), 0, pooling="last"), "")
    assert [request.id for request, _ in recent.newest_first()] == list(range(39, 7, -1))


def test_long_prompts_are_computed_elsewhere_while_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        keepers = Keepers(2, launcher=LAUNCHER)
        client = FleetClient(keepers, name="gateway", split=SplitOptions(prefill_replicas=1))
        await client.start()
        try:
            await until_ready(client, 2)
            streams = [asyncio.create_task(ask(client, [number, 1, 2, 3], 600)) for number in range(4)]
            while client.stats.generated_tokens < 40:
                await asyncio.sleep(0.005)
            draw = random.Random(1)
            longs = [[draw.randrange(600) for _ in range(400)] for _ in range(3)]
            answers = [await placed(client, each, claim=Claim(itl=0.0001)) for each in longs]
            assert [from_peers(report) for report, _ in answers] == [384, 384, 384]
            assert all({each.replica, each.computing} == {"fake-0", "fake-1"} for _, each in answers)
            assert all("; fake-" in each.why and not each.source for _, each in answers)
            assert client._router.split.decisions["split"] == 3
            await asyncio.gather(*streams)
            before = client.stats.peers.pulls
            await ask(client, [*longs[0], 5], claim=Claim(itl=10.0))
            await ask(client, [*longs[1], 5])
            assert client.stats.peers.pulls == before
            assert client._router.split.decisions == {"split": 3, "short": 1, "no_target": 5}
        finally:
            await client.close()

    run(scenario())


TIMING = EngineTiming(prefill=(0.0, 1.0, 0.0), decode=(0.0, 0.0, 5.0), pull_ms_per_token=0.02)
BUSY, FREE = Load(rows=4), Load()


UNTOLD = SplitOptions(itl_ms=50.0)  # engines know of no target, and compute as much as their budget allows


def decide(rule: SplitRule, loads: dict[int, Load], now: float, uncached: int = 1000, replica: int = 0) -> int | None:
    return rule.decide(PromptToSplit(uncached), replica, loads, TIMING, now)


def test_nobody_is_on_duty_while_long_prompts_are_rare() -> None:
    rule, loads = SplitRule(UNTOLD), {0: BUSY, 1: FREE, 2: BUSY}
    assert rule.on_duty(loads, 0.0) == frozenset()
    assert decide(rule, loads, 0.0) is None
    assert rule.on_duty(loads, 1.0) == {1}
    assert decide(rule, loads, 1.0) == 1
    assert rule.on_duty({**loads, 1: Load(rows=5)}, 1.0) == {1}  # a duty is not taken over for a row
    assert rule.on_duty({**loads, 0: FREE, 1: Load(rows=5)}, 1.0) == {0}
    assert rule.on_duty(loads, 60_000.0) == frozenset()
    assert rule.decisions == {"few_replicas": 1, "split": 1}


def test_a_duty_takes_as_many_replicas_as_long_prompts_need() -> None:
    rule, loads = SplitRule(UNTOLD), dict.fromkeys(range(4), BUSY)
    for at in range(30):
        decide(rule, loads, 10.0 * at)
    assert len(rule.on_duty(loads, 300.0)) == 3  # one is left to answer
    assert SplitRule(SplitOptions(prefill_replicas=2)).on_duty(loads, 0.0) == {0, 1}
    assert SplitRule(SplitOptions(prefill_replicas=2)).on_duty({0: BUSY}, 0.0) == frozenset()


@pytest.mark.parametrize(
    ("reason", "uncached", "changed"),
    [
        ("short", 40, {}),
        ("short", 127, {}),
        ("queue", 1000, {1: Load(queued=5000)}),
        ("split", 1000, {1: Load(queued=3000)}),
    ],
)
def test_reasons_not_to_split(reason: str, uncached: int, changed: dict[int, Load]) -> None:
    rule, loads = SplitRule(SplitOptions(50.0, prefill_replicas=1)), {0: BUSY, 1: FREE}
    rule.on_duty(loads, 0.0)
    assert (decide(rule, {**loads, **changed}, 0.0, uncached) is None) == (reason != "split")
    assert rule.decisions == {reason: 1}


def test_nobody_is_spared_where_nobody_is_answered() -> None:
    rule, loads = SplitRule(SplitOptions(50.0, prefill_replicas=1)), {0: FREE, 1: FREE}
    rule.on_duty({0: FREE, 1: BUSY}, 0.0)
    rule.on_duty(loads, 1000.0)
    assert decide(rule, loads, 1000.0, replica=1) == 0
    assert decide(rule, loads, 2001.0, replica=1) is None
    assert rule.decisions == {"split": 1, "idle": 1}
    rule.on_duty({0: FREE, 1: Load(queued=3000, waiting=2)}, 2002.0)  # all wait behind prompts
    assert decide(rule, loads, 2003.0, replica=1) == 0


def test_a_dear_transfer_and_no_target_are_reasons_too() -> None:
    rule, loads = SplitRule(SplitOptions(prefill_replicas=1)), {0: BUSY, 1: FREE}
    rule.on_duty(loads, 0.0)
    assert rule.decide(PromptToSplit(1000), 0, loads, TIMING, 0.0) is None
    assert rule.decide(PromptToSplit(1000, itl_ms=50.0), 0, loads, TIMING._replace(pull_ms_per_token=1.5), 0.0) is None
    assert rule.decisions == {"no_target": 1, "dear_transfer": 1}


def test_nothing_is_split_where_engines_keep_the_target_themselves() -> None:
    """A prompt of 1,200 tokens takes 300 ms; of these, steps beside answers compute what fits into 40 ms."""
    timing = TIMING._replace(prefill=(0.0, 0.25, 0.0), decode=(0.0, 0.0, 10.0), prefill_budget=192)
    rule, loads = SplitRule(SplitOptions(40.0, told=True)), {0: BUSY, 1: BUSY}
    for at in range(20):
        assert rule.decide(PromptToSplit(1200), 0, loads, timing, 1000.0 * at) is None
        assert rule.on_duty(loads, 1000.0 * at) == frozenset()
    assert rule.decisions == {"in_time": 20}
    for at in range(200):  # prompts come faster now than two replicas compute them beside answers
        rule.decide(PromptToSplit(1200), 0, loads, timing, 20_000.0 + 200.0 * at)
    (duty,) = rule.on_duty(loads, 60_000.0)
    assert rule.decide(PromptToSplit(1200, itl_ms=40.0), 1 - duty, loads, timing, 60_000.0) == duty


def test_a_prompt_goes_elsewhere_if_it_would_be_late_beside_answers() -> None:
    """A prompt of 3,000 tokens takes 3 s alone, and 4.8 s in what steps of 40 ms leave beside answers of 12.5 ms."""
    timing = TIMING._replace(decode=(0.0, 0.0, 12.5))
    rule, loads = SplitRule(), {0: BUSY, 1: BUSY}
    for ttft_ms, reason in ((None, "in_time"), (5000.0, "in_time"), (4500.0, "few_replicas")):
        rule.decide(PromptToSplit(3000, 0, ttft_ms, 40.0), 0, loads, timing, 0.0)
        assert rule.decisions.pop(reason) == 1
    (duty,) = rule.on_duty(loads, 1.0)
    late = PromptToSplit(3000, 0, 4500.0, 40.0)
    assert rule.decide(late, 1 - duty, loads, timing, 1.0) == duty
    assert rule.decide(late, 1 - duty, loads | {duty: Load(queued=3000)}, timing, 1.0) is None  # it is no sooner there
    assert rule.decisions.keys() == {"split", "queue"}
    patient = PromptToSplit(3000, 0, 60_000.0, 40.0)
    assert rule.decide(patient, 1 - duty, loads, timing, 2.0) == duty  # it is free, and sooner
    assert rule.on_duty(loads, 40_000.0) == frozenset()  # which is no reason to keep it on duty


def test_a_prompt_that_is_mostly_cached_stays() -> None:
    timing = TIMING._replace(decode=(0.0, 0.0, 12.5), context_ms=0.0003)
    rule, loads = SplitRule(), {0: BUSY, 1: BUSY}
    for at in range(20):
        assert rule.decide(PromptToSplit(300, 2700, 4500.0, 40.0), 0, loads, timing, 3000.0 * at) is None
        assert rule.on_duty(loads, 3000.0 * at) == frozenset()
    assert rule.decisions == {"in_time": 20}


def test_a_target_that_even_an_idle_replica_misses_is_no_reason() -> None:
    rule, loads = SplitRule(), {0: FREE, 1: FREE}
    rule.decide(PromptToSplit(3000, 0, 1000.0, 40.0), 0, loads, TIMING, 0.0)
    assert rule.decisions == {"in_time": 1}


def test_a_budget_that_is_small_enough_stops_nobody() -> None:
    timing = TIMING._replace(prefill=(0.0, 0.25, 0.0), decode=(0.0, 0.0, 10.0), prefill_budget=64)
    loads = {0: BUSY, 1: BUSY}
    for budget, decided in ((64, "in_time"), (192, "few_replicas")):
        rule = SplitRule(SplitOptions(40.0))
        rule.decide(PromptToSplit(800), 0, loads, timing._replace(prefill_budget=budget), 0.0)
        assert rule.decisions == {decided: 1}


@given(st.integers(128, 50_000), st.integers(0, 200), st.sampled_from([0, 64, 192, 640]))
def test_the_longest_step_is_between_the_budgets_and_that_of_the_whole_prompt(
    uncached: int, rows: int, budget: int
) -> None:
    timing = EngineTiming(prefill_budget=budget, step_tokens=2048)
    longest, answers = longest_step(uncached, rows, timing), timing.decode_ms(0.0)
    assert answers < longest <= answers + timing.prefill_ms(uncached) + 1e-9
    within = timing.prefill_ms(uncached) - timing.prefill_ms(max(uncached - timing.prompt_tokens(max(rows, 1)), 0))
    assert longest >= min(answers + within, timing.usual_itl_ms()) - 1e-9
    if budget:
        assert longest <= timing.usual_itl_ms() == 100.0


def test_roles_are_read() -> None:
    assert prefill_replicas(ReplicaOptions("3")) == 0
    assert prefill_replicas(ReplicaOptions("3", roles="prefill=2", itl=50.0)) == 2
    for roles in ("prefill=3", "prefill=0", "decode=1", "prefill", "prefill=x"):
        with pytest.raises(UsageError, match=f"from 1 to 2 of --replicas; got '{roles}'"):
            prefill_replicas(ReplicaOptions("3", roles=roles, itl=50.0))
    with pytest.raises(UsageError, match="give both"):
        prefill_replicas(ReplicaOptions("3", roles="prefill=1"))


def test_numbers_of_replicas_are_read() -> None:
    assert replica_range("--replicas", "3") == (3, 3)
    assert replica_range("--replicas", "2:8") == (2, 8)
    for wrong in ("", "x", "-1", "2:", ":3", "1:2:3", "٣"):
        with pytest.raises(UsageError, match="--replicas is a whole number from 1, or two of them as MIN:MAX; got"):
            replica_range("--replicas", wrong)
    for wrong in ("0", "0:3", "4:3", "1:10001"):
        with pytest.raises(UsageError, match="--replicas has from 1 to 10000 replicas, the fewest first; got"):
            replica_range("--replicas", wrong)
