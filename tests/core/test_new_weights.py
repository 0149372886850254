"""Tests what becomes of sequences and of the prefix cache when weights are replaced."""

from __future__ import annotations

import pytest

from penstock.core import Scheduler, Sequence
from penstock.core.check import check
from penstock.types import Limits
from tests.core.world import counts, limits, run, step

PROMPT = tuple(range(14))
PLAIN = limits(num_blocks=64)
RECURRENT = limits(num_blocks=64, states=8)
WINDOWED = limits(num_blocks=64, windows=(0, 6))


def renamed(scheduler: Scheduler, recompute: bool) -> None:
    scheduler.change_salts({id: f"{seq.blocks.salt} new" for id, seq in scheduler.sequences.items()}, recompute)
    check(scheduler)


@pytest.mark.parametrize("kind", [PLAIN, RECURRENT, WINDOWED])
def test_running_sequences_are_computed_again(kind: Limits) -> None:
    scheduler = Scheduler(kind)
    seq = Sequence(1, PROMPT, 20)
    scheduler.add(seq)
    for _ in range(6):
        step(scheduler)
    before = len(seq.tokens)
    renamed(scheduler, recompute=True)
    assert scheduler.stats().blocks_cached == scheduler.stats().blocks_used == 0
    assert counts(scheduler.plan()) == {1: min(before, kind.step_tokens)}


@pytest.mark.parametrize("kind", [PLAIN, RECURRENT, WINDOWED])
def test_running_sequences_keep_their_blocks_for_themselves(kind: Limits) -> None:
    scheduler = Scheduler(kind)
    seq = Sequence(1, PROMPT, 30)
    scheduler.add(seq)
    for _ in range(3):
        step(scheduler)
    held = scheduler.stats().blocks_used
    renamed(scheduler, recompute=False)
    assert scheduler.stats().blocks_used == held
    plan, _ = step(scheduler)
    assert counts(plan) == {1: 1}
    run(scheduler)
    again = Sequence(2, tuple(seq.tokens[:40]), 2, salt=" new")
    run(scheduler, again)
    assert again.times.cached == 0


def test_a_prompt_in_flight_is_not_waited_for_under_other_weights() -> None:
    """The second sequence waits to reuse the first one's prompt, until the two have nothing in common any more."""
    scheduler = Scheduler(limits(num_blocks=64, step_tokens=8, max_len=128))
    long = tuple(range(60))
    scheduler.add(Sequence(1, long, 4))
    scheduler.add(Sequence(2, long, 4))
    assert counts(step(scheduler)[0]) == {1: 8}
    renamed(scheduler, recompute=False)
    step(scheduler)
    assert not scheduler.cache.in_flight.computing or set(scheduler.cache.in_flight.computing.values()) == {2}
    run(scheduler)


def test_sequences_that_wait_share_a_prefix_under_the_new_salt() -> None:
    scheduler = Scheduler(PLAIN)
    run(scheduler, Sequence(1, PROMPT, 2))
    scheduler.add(Sequence(2, PROMPT, 2))
    renamed(scheduler, recompute=True)
    run(scheduler)
    other, same = Sequence(3, PROMPT, 2), Sequence(4, PROMPT, 2, salt=" new")
    run(scheduler, other)
    run(scheduler, same)
    assert (other.times.cached, same.times.cached) == (0, 12)
