"""Tests that a tenant's first prompt is computed before the answers of a tenant that has many, where that is quick."""

from __future__ import annotations

from itertools import cycle, pairwise

import pytest

from penstock.core import Scheduler, Sequence, SequenceParams, StandardPolicy
from penstock.types import Claim, Limits
from tests.core.test_step_cost import learned
from tests.core.test_tenants import Backlog
from tests.core.world import counts, limits, step

HEAVY = range(8)  # the ids of one tenant's sequences
SOME = limits(max_len=600, max_rows=16, step_tokens=512, num_blocks=2000)


def busy(some: Limits = SOME, itl: float | None = None, answer: int = 400) -> Scheduler:
    """Returns a scheduler that answers eight requests of one tenant; a step of theirs takes 12 ms."""
    scheduler = Scheduler(some, policy=StandardPolicy(some, learned()))
    for id in HEAVY:
        scheduler.add(Sequence(id, (id, 1, 2), answer, SequenceParams(claim=Claim("heavy", itl=itl))))
    assert any(len(counts(step(scheduler)[0])) == len(HEAVY) for _ in range(9))
    return scheduler


def planned(scheduler: Scheduler) -> set[int]:
    """Returns which sequences the next step computes."""
    return set(counts(step(scheduler)[0]))


def test_a_first_prompt_is_computed_alone_and_then_everyone_goes_on() -> None:
    scheduler = busy()
    scheduler.add(Sequence(20, (9,) * 30, 5, SequenceParams(claim=Claim("light"))))
    assert planned(scheduler) == {20}
    assert planned(scheduler) == {20, *HEAVY}


def test_a_prompt_that_takes_longer_than_the_answers_has_its_step_with_them() -> None:
    scheduler = busy()
    scheduler.add(Sequence(20, (9,) * 300, 5, SequenceParams(claim=Claim("light"))))
    assert planned(scheduler) == {20, *HEAVY}


def test_who_runs_one_already_is_no_first_and_who_runs_one_only_is_not_held() -> None:
    scheduler = busy()
    for id in (20, 21):
        scheduler.add(Sequence(id, (9, id), 50, SequenceParams(claim=Claim("light"))))
        step(scheduler)
    assert planned(scheduler) == {20, 21, *HEAVY}
    scheduler.abort(21)
    scheduler.add(Sequence(30, (8, 8), 5, SequenceParams(claim=Claim("other"))))
    assert planned(scheduler) == {20, 30}


def test_answers_with_a_target_are_not_held() -> None:
    scheduler = busy(itl=0.05)
    scheduler.add(Sequence(20, (9,) * 30, 5, SequenceParams(claim=Claim("light"))))
    assert planned(scheduler) == {20, *HEAVY}


def test_a_better_class_is_not_held() -> None:
    scheduler = busy()
    scheduler.add(Sequence(20, (9,) * 30, 5, SequenceParams(claim=Claim("light"), priority=1)))
    assert planned(scheduler) == {20, *HEAVY}


def test_nobody_is_held_before_costs_are_known() -> None:
    scheduler = Scheduler(SOME)
    for id in HEAVY:
        scheduler.add(Sequence(id, (id, 1, 2), 400, SequenceParams(claim=Claim("heavy"))))
    step(scheduler)
    scheduler.add(Sequence(20, (9,) * 30, 5, SequenceParams(claim=Claim("light"))))
    assert planned(scheduler) == {20, *HEAVY}


def test_answers_go_on_at_least_in_every_second_step() -> None:
    """Each step another tenant comes with a first prompt."""
    scheduler = busy()
    went_on = []
    for id in range(20, 60):
        scheduler.add(Sequence(id, (9, id), 2, SequenceParams(claim=Claim(f"light {id}"))))
        went_on.append(planned(scheduler) >= {*HEAVY})
    assert not all(went_on)
    assert all(one or other for one, other in pairwise(went_on))


def test_answers_go_on_if_the_first_prompt_finds_no_blocks() -> None:
    scheduler = busy(SOME._replace(max_len=240, num_blocks=60), answer=20)
    while scheduler.cache.available > 20:
        assert planned(scheduler) == {*HEAVY}
    scheduler.add(Sequence(20, (9,) * 50, 5, SequenceParams(claim=Claim("light"))))
    assert planned(scheduler) == {*HEAVY}
    assert any(20 in planned(scheduler) for _ in range(9))


def test_two_busy_tenants_keep_their_shares_and_are_not_held() -> None:
    some = SOME._replace(prefill_budget=64)
    sizes = {"a": cycle([(40, 30), (90, 10)]), "b": cycle([(64, 20)])}
    backlog = Backlog(some, sizes, {"a": 1.0, "b": 3.0}, depth=6)
    policy = StandardPolicy(some, learned())
    backlog.scheduler = Scheduler(some, policy=policy)
    held = []
    for _ in range(300):
        backlog.step()
        held.append(policy._held)
    assert sum(held) <= 1, "at the start one of them runs several, and the other none yet"
    assert backlog.work["b"] == pytest.approx(3 * backlog.work["a"], rel=0.05)
