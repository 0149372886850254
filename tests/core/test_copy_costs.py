"""Tests the decision between copying blocks in from host memory and computing them: no plan is dearer than either by
the forecast, and rates that have changed are learned within some requests."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Scheduler, Sequence, check
from penstock.core.step_cost import PromptCost
from penstock.core.tiers import CopyCosts
from penstock.types import StepPlan
from tests.core.world import answer, limits
from tests.examples import examples

SIZE, LENGTH = 4, 512  # tokens of a block, and of a sequence at most
SOON = 40  # requests of this length after which a rate that has changed by 10 is known
TOKEN = 1e-3  # seconds to compute one
FAST, SLOW = 1e-3, 1e-2  # seconds to copy a block, which takes 4e-3 to compute

rates = st.floats(1e-7, 1.0)


class Machine:
    """Runs a scheduler whose device holds one prompt, and copies blocks and states at rates that may change."""

    def __init__(self, token: float = TOKEN, pair: float = 0.0, **changed: int) -> None:
        self.prompts = PromptCost()
        for size in (32, 64, 128, 256):
            pairs = size * size / 2
            self.prompts.observe(size, pairs, token * size + pair * pairs)
        self.costs = CopyCosts(self.prompts)
        blocks = LENGTH // SIZE + 2
        some = limits(max_len=LENGTH, step_tokens=LENGTH, num_blocks=blocks, host_places=4 * blocks, **changed)
        self.scheduler = Scheduler(some, copy_costs=self.costs)
        self.seconds = {"out": FAST, "in": FAST}
        self.computed = 0.0  # seconds
        self.copied = 0.0  # seconds
        self._requests = 0

    def learn(self, out: float, into: float) -> None:
        """Has copies take so many seconds for each block, and lets that be known."""
        self.seconds = {"out": out, "in": into}
        for direction, seconds in self.seconds.items():
            for _ in range(99):
                self.costs.observe(direction, 64, 64 * seconds)

    def carry_out(self, plan: StepPlan) -> None:
        for copies, observe in ((plan.copies, self.costs.observe), (plan.state_copies, self.costs.observe_states)):
            for direction, group in groupby(copies, key=lambda copy: copy.direction):
                count = len(list(group))
                observe(direction, count, count * self.seconds[direction])
                self.copied += count * self.seconds[direction]

    def ask(self, prompt: tuple[int, ...]) -> bool:
        """Serves a request; returns whether most of its prompt was reused. Hardly any of it is on the device."""
        self._requests += 1
        self.scheduler.add(Sequence(self._requests, prompt, 1))
        start = len(prompt)
        while self.scheduler.sequences:
            plan = self.scheduler.plan()
            check(self.scheduler)
            self.carry_out(plan)
            start = min([start, *(row.start for row in plan.rows)])
            answer(self.scheduler, plan)
        self.computed += self.prompts.seconds_after(start, len(prompt))
        return start > LENGTH // 2


def prompt(number: int, length: int = LENGTH - 4) -> tuple[int, ...]:
    return (number,) * length


@settings(max_examples=examples(60))
@given(rates, st.floats(0.0, 1e-4), rates, rates, st.integers(2 * SIZE, LENGTH - 4), st.integers(0, LENGTH // SIZE))
def test_no_plan_is_dearer_than_computing_or_copying_everything(
    token: float, pair: float, out: float, into: float, length: int, kept: int
) -> None:
    machine = Machine(token, pair)
    machine.learn(1e-9, 1e-9)
    machine.ask(prompt(1, length))
    machine.ask(prompt(2))  # has all of the first one leave
    if kept * SIZE < length - 1:
        machine.ask(prompt(1, kept * SIZE + 1))  # has some of it come back
    machine.learn(out, into)
    cache, asked = machine.scheduler.cache, Sequence(99, prompt(1, length), 1)
    known = cache.prefixes.match(asked)
    assert len(known) == (length - 1) // SIZE

    def forecast(blocks: int, copied: int) -> float:
        """Returns the seconds of a plan that reuses so many blocks of the prompt, and copies so many of them in."""
        rest = machine.prompts.seconds_after(blocks * SIZE, length)
        return copied * machine.costs.seconds("in", 1) + rest

    here = cache.prefixes.reusable(known, host=False)
    used = len(cache.prefixes.usable(known))
    plan, computing = forecast(used, used - here), forecast(here, 0)
    assert used >= here
    assert plan <= 1.05 * computing
    assert plan <= forecast(len(known), len(known) - here) * (1 + 1e-9)
    best = min(forecast(count, count - here) for count in range(here, len(known) + 1))
    assert plan <= best * (1 + 1e-9) + 1e-12, "a part of it would be cheaper"


@pytest.mark.parametrize(("before", "after"), [(FAST, SLOW), (SLOW, FAST), (FAST / 10, FAST), (SLOW, 10 * SLOW)])
def test_a_rate_that_changes_by_ten_turns_the_decision_within_some_requests(before: float, after: float) -> None:
    machine = Machine()
    machine.learn(before, before)
    for number in range(20):
        assert machine.ask(prompt(number % 2)) is (before < TOKEN * SIZE and number > 1)
    machine.seconds = {"out": after, "in": after}
    for number in range(SOON):
        machine.ask(prompt(number % 2))
    machine.computed = machine.copied = 0.0
    whole = machine.prompts.seconds_after(0, LENGTH - 4)
    for number in range(20):
        assert machine.ask(prompt(number % 2)) is (after < TOKEN * SIZE)
    assert machine.computed + machine.copied <= 1.05 * 20 * whole  # with all that trials take


def test_a_copy_that_was_held_up_counts_a_few_times_what_was_expected() -> None:
    costs = CopyCosts()
    costs.observe("in", 100, 0.1)
    costs.observe("in", 100, 9.0)
    assert costs.seconds("in", 100) == pytest.approx(0.2)
    costs.observe("in", 1, 0.003)
    assert costs.seconds("in", 100) == pytest.approx(0.225)  # three parts of 0.2 and one of 0.3


def test_a_trial_copies_idle_blocks_and_a_state_and_changes_nothing() -> None:
    machine = Machine(states=2, host_states=2)
    machine.ask(prompt(1))
    machine.costs.observe_states("out", 1, 1e-3)
    machine.costs.observe_states("in", 1, 1e-3)
    machine.learn(SLOW, SLOW)
    machine.costs.decline(10_000_000, 0)
    plan = machine.scheduler.plan()
    cache = machine.scheduler.cache
    idle = [block for node in cache.prefixes.match(Sequence(9, (*prompt(1), 50, 1), 1)) for block in node.blocks]
    for copies, count in ((plan.copies, CopyCosts.TRIED), (plan.state_copies, 1)):
        assert [copy.direction for copy in copies] == ["out"] * count + ["in"] * count
        assert [copy[:2] for copy in copies[:count]] == [copy[:2] for copy in copies[count:]]
    assert {copy.block for copy in plan.copies} <= {*idle}
    assert plan.state_copies[0].block in cache.states.saved().values()
    assert cache.host.used == 0
    check(machine.scheduler)
    assert not machine.scheduler.plan().copies  # what was saved up is spent


def test_a_trial_takes_free_blocks_where_none_is_idle_and_needs_a_place() -> None:
    machine = Machine(states=1)
    machine.learn(SLOW, SLOW)
    machine.costs.decline(10_000_000, 0)
    plan = machine.scheduler.plan()
    assert len(plan.copies) == 2 * CopyCosts.TRIED
    assert not plan.state_copies  # no state was saved yet
    machine.ask(prompt(1))
    machine.costs.decline(10_000_000, 0)
    plan = machine.scheduler.plan()
    assert plan.copies
    assert not plan.state_copies  # host memory has no place for states
    machine = Machine(states=1, host_states=1)
    machine.ask(prompt(1))
    assert machine.scheduler.cache.states.reserve() == 0
    machine.costs.decline(10_000_000, 0)
    assert not machine.scheduler.plan().state_copies  # somebody else fills the only one
