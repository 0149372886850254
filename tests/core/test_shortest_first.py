"""Tests that short prompts of a tenant do not wait behind its long ones, and that long ones do not wait for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core import Scheduler, Sequence, SequenceParams, StandardPolicy
from penstock.types import PROMPT_PATIENCE, Claim
from tests.core.test_step_cost import learned
from tests.core.world import counts, limits, step

SOME = limits(max_len=6000, max_rows=64, step_tokens=256, num_blocks=4000)
LONG, SHORT = 5000, 40
KNOWN = learned()


def scheduled() -> Scheduler:
    return Scheduler(SOME, policy=StandardPolicy(SOME, KNOWN))


def prompt(id: int, tokens: int, **claim: float) -> Sequence:
    return Sequence(id, (id,) * tokens, 2, SequenceParams(claim=Claim("one", **claim)))


def test_a_short_prompt_goes_before_the_rest_of_a_long_one() -> None:
    scheduler = scheduled()
    scheduler.add(prompt(1, LONG))
    assert counts(step(scheduler)[0]) == {1: 256}
    scheduler.add(prompt(2, SHORT))
    assert counts(step(scheduler)[0]) == {2: SHORT, 1: 256 - SHORT}


def test_a_short_prompt_goes_before_long_ones_that_wait() -> None:
    scheduler = scheduled()
    for id in (1, 2, 3):
        scheduler.add(prompt(id, LONG))
    scheduler.add(prompt(4, SHORT))
    assert counts(step(scheduler)[0]) == {4: SHORT, 1: 256 - SHORT}


def test_what_is_cached_of_a_prompt_takes_no_time() -> None:
    scheduler = scheduled()
    scheduler.add(prompt(1, LONG))
    while scheduler.sequences:
        step(scheduler)
    scheduler.add(prompt(2, 300))
    scheduler.add(Sequence(3, (1,) * LONG, 2, SequenceParams(claim=Claim("one"))))  # which is the first one's
    assert 3 in counts(step(scheduler)[0])


def test_a_prompt_that_is_nearly_done_is_not_interrupted() -> None:
    scheduler = scheduled()
    scheduler.add(prompt(1, 300))
    step(scheduler)
    scheduler.add(prompt(2, 200))
    assert counts(step(scheduler)[0]) == {1: 44, 2: 200}


def test_deadlines_and_unknown_costs_come_first() -> None:
    scheduler = scheduled()
    scheduler.add(prompt(1, LONG, ttft=60.0))
    scheduler.add(prompt(2, SHORT))
    assert counts(step(scheduler)[0]) == {1: 256}
    unknown = Scheduler(SOME)
    unknown.add(prompt(1, LONG))
    unknown.add(prompt(2, SHORT))
    assert counts(step(unknown)[0]) == {1: 256}


@given(st.lists(st.integers(1, 250), min_size=10, max_size=20), st.floats(0.5, 3.0))
def test_a_long_prompt_goes_before_all_that_come_after_its_patience(lengths: list[int], pause: float) -> None:
    """Short prompts keep coming, one a step: none that comes later than the long one's rank goes before it."""
    scheduler, patience = scheduled(), PROMPT_PATIENCE * KNOWN.prompt_seconds(LONG)
    scheduler.add(long := prompt(0, LONG))
    for id, length in enumerate(lengths, 1):
        scheduler.now += pause
        scheduler.add(prompt(id, length))
        left = LONG - long.planned
        started = id in counts(step(scheduler)[0])
        assert not started or scheduler.now < patience or left < 256
