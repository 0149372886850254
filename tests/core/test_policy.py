"""Tests what the policy decides: who loses its memory, and when requests that may wait start."""

from __future__ import annotations

from collections.abc import Sequence as Line

import pytest

from penstock.core import Scheduler, Sequence, SequenceParams, StandardPolicy
from penstock.core.policy import ServingLoad, StepBudget
from penstock.core.tenants import Tenant
from penstock.types import Finished
from tests.core.world import counts, limits, run, step


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return (first, *range(1, length))


@pytest.mark.usefixtures("overcommitted")
def test_the_policy_chooses_who_loses_its_memory() -> None:
    class First(StandardPolicy):
        def victim(self, behind: Line[Sequence], places: int = 0) -> Sequence:
            return behind[0]

    some = limits(num_blocks=8, max_len=32, max_rows=3)
    scheduler = Scheduler(some, policy=First(some))
    events = run(scheduler, *(Sequence(id, prompt(5, first=id), 20) for id in range(3)))
    lost = {event.seq: event.report.preemptions for event in events if isinstance(event, Finished) and event.report}
    assert lost[0] == 0
    assert lost[1] > lost[2]


# -- background --------------------------------------------------------------------------------------------------


def background(id: int, length: int = 3, max_tokens: int = 5) -> Sequence:
    return Sequence(id, prompt(length, first=id), max_tokens, SequenceParams(background=True))


def test_background_requests_have_at_most_half_of_the_rows() -> None:
    scheduler = Scheduler(limits(max_rows=8, step_tokens=64, num_blocks=64))
    for id in range(8):
        scheduler.add(background(id))
    assert list(counts(step(scheduler)[0])) == [0, 1, 2, 3]


@pytest.mark.usefixtures("overcommitted")
def test_background_requests_start_after_and_are_preempted_before_all_others() -> None:
    scheduler = Scheduler(limits(max_rows=2, num_blocks=64))
    scheduler.add(Sequence(1, prompt(3), 1, SequenceParams(priority=7)))
    scheduler.add(background(2))
    scheduler.add(Sequence(3, prompt(3), 1, SequenceParams(priority=9)))
    assert list(counts(step(scheduler)[0])) == [1, 3]
    small = Scheduler(limits(max_rows=2, num_blocks=8, max_len=32))
    small.add(background(1, length=9, max_tokens=20))
    step(small)
    events = run(small, Sequence(2, prompt(9), 20, SequenceParams(priority=99)))
    lost = {event.seq: event.report.preemptions for event in events if isinstance(event, Finished) and event.report}
    assert lost[1] > 0
    assert lost[2] == 0


def test_those_that_end_are_not_followed_while_others_are_served() -> None:
    scheduler = Scheduler(limits(max_rows=16, step_tokens=64, num_blocks=256))
    for id in range(12):
        scheduler.add(background(id, max_tokens=2 + id % 8))  # one of the eight that run ends in every step
    assert len(counts(step(scheduler)[0])) == 8
    scheduler.add(Sequence(99, prompt(3), 30))
    running = [len(counts(step(scheduler)[0])) for _ in range(12)]
    assert running == [9, 8, 7, 6, 5, 4, 3, 3, 3, 3, 3, 3]  # with two of eight: a quarter
    scheduler.abort(99)
    assert len(run(scheduler)) > 0


def test_a_quarter_of_half_of_the_rows_is_never_none() -> None:
    policy = StandardPolicy(limits(max_rows=1))
    seq = background(1)
    seq.standing.tenant = Tenant("")
    assert policy.may_start(seq, StepBudget(1), ServingLoad(0, 0, 5))
    assert not policy.may_start(seq, StepBudget(1), ServingLoad(1, 1, 0))
    assert not policy.may_start(seq, StepBudget(0), ServingLoad(0, 0, 0))
