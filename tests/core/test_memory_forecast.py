"""Tests that sequences start only if all will likely find their blocks, and who loses its blocks if they do not."""

from __future__ import annotations

import json
from collections.abc import Sequence as Line
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Scheduler, Sequence, SequenceParams, StandardPolicy
from penstock.core.lengths import AnswerLengths
from penstock.core.memory_forecast import MemoryForecast, held_blocks, shared_blocks
from penstock.core.policy import Room
from penstock.core.tenants import Tenant
from penstock.core.tiers import CopyCosts
from penstock.types import Claim, Finished, Limits, RowResult, StepResult, blocks_for
from tests.core.test_step_cost import learned
from tests.core.world import counts, limits, run, step
from tests.examples import examples

TRACES = json.loads((Path(__file__).parent / "data" / "traces.json").read_text())
STOP = 99


class Greedy(StandardPolicy):
    """Lets everybody start that finds blocks for the tokens it has."""

    def fits(self, seq: Sequence, room: Room, running: Line[Sequence]) -> bool:
        return not running or room.available >= room.needed + room.reserved + (len(running) + 1) * room.groups


def replay(policy: type[StandardPolicy], sizes: list[tuple[int, int, int]], num_blocks: int) -> tuple[float, float]:
    """Answers requests of these sizes (prompt, answer, max_tokens) that all come at once. Returns the share of tokens
    that were computed again, and the time if a step costs as much as 15 tokens and each token one."""
    max_len = max(prompt + most for prompt, _, most in sizes)
    some = Limits(max_len, 64, 512, 16, num_blocks, 100, prefill_budget=256)
    scheduler = Scheduler(some, policy=policy(some))
    for id, (prompt, _, most) in enumerate(sizes):
        tokens = tuple(Random(id).choices(range(90), k=prompt))
        scheduler.add(Sequence(id, tokens, most, SequenceParams(stop_ids=frozenset({STOP}))))
    computed = again = 0
    while scheduler.sequences:
        plan = scheduler.plan()
        rows = []
        for row in plan.rows:
            seq = scheduler.sequences[row.seq]
            ends = len(seq.tokens) - seq.prompt_len + 1 >= sizes[row.seq][1]
            rows.append(RowResult((STOP if ends else 5,) if row.sample else ()))
        computed += sum(counts(plan).values())
        for event in scheduler.commit(plan, StepResult(plan.step, tuple(rows))):
            again += event.report.recomputed if isinstance(event, Finished) and event.report else 0
    return again / computed, 15.0 * plan.step + computed


def quarter(name: str, smaller: int, most: int | None) -> tuple[list[tuple[int, int, int]], int]:
    """Returns the sizes of a trace's first 48 requests and a quarter of the blocks that all of them need."""
    sizes = [(1 + prompt // smaller, answer, most or answer) for _, prompt, answer in TRACES[name][:48]]
    return sizes, sum(blocks_for(prompt + answer, (0,), 16) for prompt, answer, _ in sizes) // 4


@pytest.mark.parametrize("most", [None, 1024])
@pytest.mark.parametrize(("name", "smaller"), [("mooncake", 64), ("mooncake", 16), ("azure", 8)])
def test_at_a_quarter_of_the_memory_little_is_computed_twice(name: str, smaller: int, most: int | None) -> None:
    sizes, num_blocks = quarter(name, smaller, most)
    before, time_before = replay(Greedy, sizes, num_blocks)
    again, time = replay(StandardPolicy, sizes, num_blocks)
    assert before > 0.04
    assert again < min(0.04, before / 5)
    assert time < time_before / 0.93


def test_short_answers_do_not_leave_memory_idle() -> None:
    """Answers of 8 tokens that may have 1,024 run beside as many others as without a forecast."""
    sizes = [(64, 8, 1024)] * 400
    _, greedy = replay(Greedy, sizes, 130)
    again, time = replay(StandardPolicy, sizes, 130)
    assert again < 0.01
    assert time < greedy / 0.9


# -- what is forecast ------------------------------------------------------------------------------------------------


def forecast(some: Limits) -> MemoryForecast:
    return MemoryForecast(some, AnswerLengths())


@settings(max_examples=examples(60))
@given(st.sampled_from([(0,), (0, 5), (6, 1), (0, 0, 3, 17)]), st.integers(1, 40), st.integers(1, 20))
def test_blocks_are_counted_as_a_sequence_of_each_length_holds_them(
    windows: tuple[int, ...], prompt: int, answer: int
) -> None:
    some = limits(windows=windows, num_blocks=99 * len(windows))
    scheduler, expected = Scheduler(some), forecast(some)
    seq = Sequence(1, tuple(range(prompt)), answer)
    scheduler.add(seq)
    while scheduler.sequences:
        step(scheduler)
        if seq.blocks.tables and seq.computed // some.block_size > prompt // some.block_size:
            assert held_blocks(seq) == expected.blocks(seq.computed)


def test_a_certain_future_is_forecast_exactly() -> None:
    """Answers that may have one more token are forecast to take what that token needs."""
    some = limits(num_blocks=64, windows=(0, 6))
    scheduler = Scheduler(some)
    for id in range(3):
        scheduler.add(Sequence(id, (id,) * 7, 2))
    scheduler.plan()
    waiting = Sequence(9, (9,) * 10, 0)
    missing = sum(forecast(some).blocks(9) - held_blocks(seq) for seq in scheduler.running)
    peak = forecast(some).peak(waiting, 6, scheduler.running)
    assert peak == pytest.approx(missing + 6, abs=0.05)


def test_what_is_shared_is_neither_taken_nor_freed_twice() -> None:
    some = limits(num_blocks=64, max_rows=8, step_tokens=64)
    scheduler = Scheduler(some, policy=(policy := StandardPolicy(some)))
    prompt = tuple(range(12))
    run(scheduler, Sequence(1, prompt, 1))
    for id in (2, 3):
        scheduler.add(Sequence(id, (*prompt, 50 + id), 9))
    scheduler.add(Sequence(4, (7,) * 13, 9))
    step(scheduler)
    assert [shared_blocks(seq) for seq in scheduler.running] == [3, 3, 0]
    assert [policy._waste(seq, 0) for seq in scheduler.running] == [(1, 1), (1, 1), (13 / 4, 13)]
    assert scheduler.policy.victim(scheduler.running).id == 3


def test_whoever_frees_nothing_is_not_chosen() -> None:
    scheduler = Scheduler(limits(num_blocks=64, max_rows=8, step_tokens=64))
    scheduler.add(Sequence(1, (1,) * 9, 9))
    step(scheduler)
    (one,) = scheduler.running
    other = Sequence(2, (2,), 1)
    other.standing.tenant = Tenant("")
    one.standing.tenant.counter = other.standing.tenant.counter
    assert scheduler.policy.victim([one, other]) is one


def test_windows_make_long_sequences_dear_victims() -> None:
    scheduler = Scheduler(limits(windows=(5, 6), num_blocks=64, step_tokens=64))
    scheduler.add(Sequence(1, (1,) * 40, 9))
    scheduler.add(Sequence(2, (2,) * 7, 9))
    for _ in range(3):
        step(scheduler)
    long, short = scheduler.sequences[1], scheduler.sequences[2]
    assert held_blocks(long) <= held_blocks(short) + 2
    assert scheduler.policy.victim([long, short]) is short


def test_where_host_memory_has_room_copying_is_the_waste() -> None:
    """A long sequence costs more to compute again for each block. Its blocks are full, so that they can be copied, and
    of the short one a part has to be computed again."""
    some = limits(max_len=2000, num_blocks=200, block_size=16, step_tokens=2000, host_places=100)
    costs, copies = learned(), CopyCosts()
    policy = StandardPolicy(some, costs, copies)
    scheduler = Scheduler(some, policy=policy)
    scheduler.add(Sequence(1, (1,) * 1008, 9))
    scheduler.add(Sequence(2, (2,) * 31, 9))
    step(scheduler)
    long, short = scheduler.sequences[1], scheduler.sequences[2]
    blocks = held_blocks(long)
    assert scheduler.cache.host.room == 100
    assert policy.victim([long, short]) is short
    assert policy.victim([long, short], blocks - 1) is short  # it would cost the copies of others
    for direction in ("in", "out"):
        copies.observe(direction, 10, 1e-5)
    assert policy.victim([long, short], blocks) is long
    assert policy._waste(long, blocks)[1] == pytest.approx(blocks * 2e-6 + costs.prompts.seconds(0, 0))
    for direction in ("in", "out") * 40:
        copies.observe(direction, 10, 1e3)  # slower than computing
    assert policy.victim([long, short], blocks) is short
    assert StandardPolicy(some, costs).victim([long, short], blocks) is short


# -- who may start ---------------------------------------------------------------------------------------------------


def test_one_starts_whatever_it_may_need_and_others_when_they_will_find_their_blocks() -> None:
    some = limits(num_blocks=16, max_len=64)
    scheduler = Scheduler(some)
    for id in range(4):
        scheduler.add(Sequence(id, (id,) * 5, 50))
    assert list(counts(step(scheduler)[0])) == [0]
    run(scheduler)
    assert scheduler.stats().preemptions == 0


def test_more_start_where_host_memory_keeps_what_a_preemption_takes() -> None:
    started = []
    for places in (0, 32):
        scheduler = Scheduler(limits(num_blocks=16, max_len=64)._replace(host_places=places))
        for id in range(4):
            scheduler.add(Sequence(id, (id,) * 5, 50))
        started.append(len(counts(step(scheduler)[0])))
    assert started == [1, 2]


def test_a_first_request_does_not_wait_for_the_answers_of_who_has_several() -> None:
    """The tenant that has several running grows into less memory, instead of giving one of its places up at once."""
    scheduler = Scheduler(limits(num_blocks=32, max_len=64, step_tokens=64, max_rows=8))
    for id in range(4):
        scheduler.add(Sequence(id, (id,) * 5, 40, SequenceParams(claim=Claim("heavy"))))
    step(scheduler)
    waiting = scheduler.tenants.waiting
    assert waiting
    scheduler.add(Sequence(9, (9,) * 5, 40, SequenceParams(claim=Claim("light"))))
    assert 9 in counts(step(scheduler)[0])
    assert scheduler.tenants.waiting == waiting
    assert scheduler.stats().preemptions == 0


def test_more_is_kept_free_after_preemptions_and_less_after_answers_without() -> None:
    memory = forecast(limits())
    first = memory.deviations
    clean, again = Sequence(1, (1,) * 9, 1), Sequence(2, (1,) * 9, 1)
    again.times.recomputed = 9
    memory.end(clean)
    assert memory.deviations < first
    memory.end(again)
    assert memory.deviations > first
    for _ in range(999):
        memory.end(clean)
    assert memory.deviations == -1
    for _ in range(99):
        memory.end(again)
    assert memory.deviations == 3
