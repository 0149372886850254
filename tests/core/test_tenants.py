"""Tests that tenants share the engine: VTC's bound holds at every step, nobody starves, and idle time is not saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Scheduler, Sequence, SequenceParams
from penstock.core.tenants import MOST_IDLE, PER_GENERATED, Tenants, Turns
from penstock.types import Claim, Event, Finished, Limits, StepPlan, Tokens
from tests.core.world import counts, limits, run, step
from tests.examples import examples

Size = tuple[int, int]  # tokens of a prompt, and of its answer


class Backlog:
    """Keeps tenants busy: each has `depth` sequences waiting before every step. Work is counted apart from the
    scheduler's own counters."""

    def __init__(self, limits: Limits, sizes: dict[str, Iterator[Size]], weights: dict[str, float], depth: int) -> None:
        self.scheduler = Scheduler(limits)
        self.work: Counter[str] = Counter()
        self.longest = 0  # prompt so far
        self.in_flight = 0  # most tokens of one step's sequences so far
        self._sizes, self._weights, self._depth = sizes, weights, depth
        self._ids = count()
        self._computed: Counter[int] = Counter()  # prompt tokens of each sequence

    def step(self) -> tuple[StepPlan, list[Event]]:
        lines = {tenant.name: len(tenant.line) for tenant in self.scheduler.tenants}
        for name, sizes in self._sizes.items():
            for _ in range(self._depth - lines.get(name, 0)):
                self.add(name, *next(sizes))
        owners = {id: seq.params.claim.tenant for id, seq in self.scheduler.sequences.items()}
        prompts = {id: seq.prompt_len for id, seq in self.scheduler.sequences.items()}
        plan, events = step(self.scheduler)
        self.in_flight = max(self.in_flight, sum(row.start + row.count + row.sample for row in plan.rows))
        for row in plan.rows:
            end = min(row.start + row.count, prompts[row.seq])
            self.work[owners[row.seq]] += max(end - max(row.start, self._computed[row.seq]), 0)
            self._computed[row.seq] = max(self._computed[row.seq], end)
        for event in events:
            if isinstance(event, Tokens):
                self.work[owners[event.seq]] += PER_GENERATED * len(event.tokens)
        return plan, events

    def add(self, name: str, prompt: int, answer: int, priority: int = 0) -> Sequence:
        id = next(self._ids)
        self.longest = max(self.longest, prompt)
        tokens = tuple((id * 7 + at * at) % 100 for at in range(prompt))
        params = SequenceParams(claim=Claim(name, self._weights[name]), priority=priority)
        seq = Sequence(id, tokens, answer, params, prefix_cache=False)
        self.scheduler.add(seq)
        return seq

    @property
    def bound(self) -> float:
        """Returns by how much the work of two tenants, divided by their weights, may differ: VTC's bound."""
        return 2 * max(self.longest, PER_GENERATED * self.in_flight) / min(self._weights.values())

    def difference(self, one: str, other: str) -> float:
        return abs(self.work[one] / self._weights[one] - self.work[other] / self._weights[other])


def sizes_of(random: Random, prompt: int, answer: int) -> Iterator[Size]:
    while True:
        yield random.randint(1, prompt), random.randint(1, answer)


@settings(max_examples=examples(60))
@given(
    st.randoms(use_true_random=False),
    st.tuples(st.integers(1, 40), st.integers(1, 20)),
    st.tuples(st.integers(1, 40), st.integers(1, 20)),
    st.sampled_from([(1.0, 1.0), (3.0, 1.0), (1.0, 0.25)]),
    st.integers(2, 6),
    st.sampled_from([16, 24, 64]),
)
def test_two_busy_tenants_get_their_shares_of_the_work_at_every_step(
    random: Random, one: Size, other: Size, weights: tuple[float, float], rows: int, blocks: int
) -> None:
    world = Backlog(
        limits(max_rows=rows, num_blocks=blocks),
        {"one": sizes_of(random, *one), "other": sizes_of(random, *other)},
        dict(zip(("one", "other"), weights, strict=True)),
        depth=2 * rows,
    )
    for _ in range(120):
        world.step()
        assert world.difference("one", "other") <= world.bound


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_work_comes_in_the_proportion_of_weights(weight: float) -> None:
    random = Random(1)
    sizes = {"heavy": sizes_of(random, 12, 12), "light": sizes_of(random, 30, 6)}
    world = Backlog(limits(max_rows=4, num_blocks=64), sizes, {"heavy": weight, "light": 1.0}, depth=4)
    for _ in range(2000):
        world.step()
    assert world.work["heavy"] / world.work["light"] == pytest.approx(weight, rel=0.02)


def test_a_light_tenant_beside_256_queued_requests_waits_two_steps() -> None:
    world = Backlog(limits(max_rows=4, num_blocks=64), {}, {"heavy": 1.0, "light": 1.0}, depth=0)
    for _ in range(256):
        world.add("heavy", 10, 20)
    waited = []
    for _ in range(20):
        for _ in range(7):
            world.step()
        seq = world.add("light", 5, 2)
        for steps in count(1):
            if any(isinstance(event, Tokens) and event.seq == seq.id for event in world.step()[1]):
                waited.append(steps)
                break
    assert max(waited) <= 2


def test_a_long_prompt_of_another_tenant_does_not_hold_up_a_short_one() -> None:
    scheduler = Scheduler(limits(num_blocks=64))
    scheduler.add(Sequence(1, tuple(range(60)), 1, SequenceParams(claim=Claim("heavy"))))
    step(scheduler)
    scheduler.add(Sequence(2, (7, 7, 7), 1, SequenceParams(claim=Claim("light"))))
    assert counts(step(scheduler)[0]) == {2: 3, 1: 13}


def test_a_first_prompt_shares_its_step_with_no_other_that_starts() -> None:
    scheduler = Scheduler(limits(max_rows=8, step_tokens=64, num_blocks=64))
    for id in range(3):
        scheduler.add(Sequence(id, (id,) * 5, 9, SequenceParams(claim=Claim("heavy"))))
    assert len(step(scheduler)[0].rows) == 3  # nobody else runs
    for id, tenant in ((3, "heavy"), (4, "light"), (5, "other")):
        scheduler.add(Sequence(id, (id,) * 5, 9, SequenceParams(claim=Claim(tenant))))
    assert set(counts(step(scheduler)[0])) == {0, 1, 2, 4, 5}
    assert 3 in counts(step(scheduler)[0])


def test_nobody_starves_beside_many_tenants_with_lower_weights_and_later_arrivals() -> None:
    world = Backlog(limits(max_rows=2, num_blocks=64), {}, {"busy": 8.0, "rare": 0.125}, depth=0)
    rare = world.add("rare", 4, 4)
    ended: list[int] = []
    for _ in range(400):
        while len(world.scheduler.sequences) < 6:
            world.add("busy", 5, 5)
        ended += [event.seq for event in world.step()[1] if isinstance(event, Finished)]
    assert rare.id in ended


def test_idle_time_is_not_saved_up() -> None:
    """Returns to a busy engine get no more than half of it, however long the tenant was away."""
    random = Random(2)
    world = Backlog(
        limits(max_rows=4, num_blocks=64), {"busy": sizes_of(random, 9, 9)}, {"busy": 1.0, "back": 1.0}, depth=4
    )
    for _ in range(300):
        world.step()
    world._sizes["back"] = sizes_of(random, 9, 9)
    before = world.work.copy()
    for _ in range(300):
        world.step()
    done = world.work - before
    assert done["back"] == pytest.approx(done["busy"], rel=0.1)


def test_a_tenant_that_comes_back_alone_starts_where_the_last_one_stands() -> None:
    scheduler = Scheduler(limits())
    run(scheduler, Sequence(1, (1, 2, 3), 4, SequenceParams(claim=Claim("one"))))
    assert len(scheduler.tenants) == 0
    scheduler.add(Sequence(2, (1,), 1, SequenceParams(claim=Claim("other"))))
    (other,) = scheduler.tenants
    assert other.counter == 3 + 4 * PER_GENERATED


def test_what_was_cached_or_is_computed_again_is_free() -> None:
    scheduler = Scheduler(limits(num_blocks=64))
    run(scheduler, Sequence(1, tuple(range(9)), 1, SequenceParams(claim=Claim("one"))))
    before = scheduler.tenants._idle["one"].counter
    seq = Sequence(2, tuple(range(9)), 3, SequenceParams(claim=Claim("one")))
    scheduler.add(seq)
    step(scheduler)
    assert seq.times.cached == 8
    assert seq.standing.tenant.counter == before + 1 + PER_GENERATED
    scheduler.preempt(seq)
    run(scheduler)
    assert scheduler.tenants._idle["one"].counter == before + 1 + 3 * PER_GENERATED


def test_who_loses_its_memory_is_of_the_tenant_most_over_its_share_and_has_least_to_compute_again() -> None:
    scheduler = Scheduler(limits(max_rows=4, num_blocks=64))
    small, large = Claim("small"), Claim("large")
    for id, claim, length in ((1, small, 4), (2, large, 9), (3, large, 5), (4, small, 3)):
        scheduler.add(Sequence(id, (id,) * length, 9, SequenceParams(claim=claim)))
    step(scheduler)
    step(scheduler)
    assert scheduler.policy.victim(scheduler.running).id == 3


@pytest.mark.usefixtures("overcommitted")
def test_a_first_request_finds_a_row_and_blocks_at_the_cost_of_who_has_several() -> None:
    scheduler = Scheduler(limits(max_rows=4, num_blocks=13, max_len=48))
    for id in range(4):
        scheduler.add(Sequence(id, (id,) * 9, 30, SequenceParams(claim=Claim("heavy")), prefix_cache=False))
    for _ in range(4):
        step(scheduler)
    scheduler.add(Sequence(9, (9,) * 9, 2, SequenceParams(claim=Claim("light"))))
    answered = [event.seq for _ in range(4) for event in step(scheduler)[1] if isinstance(event, Tokens)]
    assert 9 in answered
    assert scheduler.stats().preemptions > 0


def test_no_first_request_displaces_one_of_a_better_class_or_the_only_one() -> None:
    scheduler = Scheduler(limits(max_rows=2, num_blocks=64))
    for id in (1, 2):
        scheduler.add(Sequence(id, (id,) * 3, 9, SequenceParams(claim=Claim("urgent"), priority=-1)))
    step(scheduler)
    scheduler.add(Sequence(3, (3,) * 3, 9, SequenceParams(claim=Claim("other"))))
    step(scheduler)
    assert scheduler.stats().preemptions == 0
    scheduler.abort(1)
    step(scheduler)  # one of each runs now
    scheduler.add(Sequence(4, (4,) * 3, 9, SequenceParams(claim=Claim("third"))))
    step(scheduler)
    assert scheduler.stats().preemptions == 0


def test_counters_of_idle_tenants_are_bounded() -> None:
    tenants = Tenants(lambda seq: seq.standing.arrival)
    for id in range(MOST_IDLE + 9):
        seq = Sequence(id, (1,), 1, SequenceParams(claim=Claim(f"tenant {id}")))
        tenants.add(seq)
        assert seq.params.claim.tenant in tenants
        tenants.take(seq)
        tenants.end(seq)
        assert seq.params.claim.tenant not in tenants
    assert len(tenants._idle) == MOST_IDLE


def test_who_loses_its_blocks_while_a_step_is_planned_has_no_turn_in_it() -> None:
    one, other = Sequence(1, (1,), 1), Sequence(2, (1,), 1)
    one.blocks.tables, other.blocks.tables = [[0]], [[1]]
    turns = iter(Turns([one, other], [], lambda seq: seq.id))
    assert next(turns) is one
    other.blocks.tables = []
    assert list(turns) == []
