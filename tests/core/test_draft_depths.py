"""Tests that a draft model drafts as many tokens as pay, its own steps included."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.drafting.depths import DraftDepths, plan_depths
from penstock.core.drafting.lengths import Exploration

RATES = st.sampled_from((0.05, 0.1, 0.3, 0.5, 0.8, 0.9, 0.99))
SURVIVAL = st.lists(RATES, max_size=6).map(lambda rates: tuple(accumulate(rates, float.__mul__)))
RISES = st.lists(st.sampled_from((0.0, 0.1, 0.5, 1.0)), min_size=40, max_size=40)
SECONDS = RISES.map(lambda rises: list(accumulate(rises, initial=2.0)))
DRAFT_SECONDS = st.lists(st.sampled_from((0.0, 0.01, 0.2)), min_size=4, max_size=4).map(
    lambda rises: list(accumulate(rises, initial=0.0))
)


def at(seconds: Sequence[float], tokens: float) -> float:
    below = int(tokens)
    return seconds[below] + (seconds[below + 1] - seconds[below]) * (tokens - below)


def rate(survival: Sequence[float], depth: int, seconds: Sequence[float], draft: float) -> float:
    """Returns the tokens per second of one row that has so many drafted, of which those that survive are verified."""
    gained = sum(survival[:depth])
    return (1 + gained) / (at(seconds, gained) + depth * draft)


@given(SURVIVAL, SECONDS, DRAFT_SECONDS, st.integers(0, 8))
def test_one_row_drafts_what_gives_the_most_tokens_per_second(
    survival: tuple[float, ...], seconds: list[float], draft_seconds: list[float], budget: int
) -> None:
    [depth], least = plan_depths([survival], [()], seconds, draft_seconds, 1, budget)
    rates = [rate(survival, each, seconds, draft_seconds[1]) for each in range(min(len(survival), budget) + 1)]
    assert depth <= budget
    assert rates[depth] == pytest.approx(max(rates))
    assert 0 <= least <= 1


@given(st.lists(SURVIVAL, min_size=1, max_size=4), SECONDS, DRAFT_SECONDS)
def test_it_never_promises_less_than_no_drafts(
    survivals: list[tuple[float, ...]], seconds: list[float], draft_seconds: list[float]
) -> None:
    rows = len(survivals)
    depths, _ = plan_depths(survivals, [()] * rows, seconds, draft_seconds, rows, 24)
    gained = sum(sum(survival[:depth]) for survival, depth in zip(survivals, depths, strict=True))
    widths = [sum(depth > step for depth in depths) for step in range(max(depths))]
    spent = at(seconds, gained) + sum(draft_seconds[width] for width in widths)
    assert (rows + gained) / spent >= rows / seconds[0] - 1e-9


@given(SURVIVAL, SECONDS, DRAFT_SECONDS)
def test_a_dearer_draft_model_drafts_no_more(
    survival: tuple[float, ...], seconds: list[float], draft_seconds: list[float]
) -> None:
    depths = [
        plan_depths([survival], [()], seconds, [factor * each for each in draft_seconds], 1, 8).depths[0]
        for factor in (0, 1, 4)
    ]
    assert depths == sorted(depths, reverse=True)


def test_a_row_for_which_a_copy_promises_more_is_not_drafted_for() -> None:
    seconds = [1 + 0.02 * count for count in range(40)]
    likely, copied = (0.8, 0.6, 0.5), (0.95, 0.9, 0.85)
    plan = plan_depths([likely, likely], [(), copied], seconds, [0.0, 0.02, 0.03], 2, 24)
    assert plan.depths == [3, 0]


def test_a_copy_that_is_enough_leaves_nothing_to_a_model_that_is_slow() -> None:
    seconds = [1.0] * 40
    assert plan_depths([(0.9,), (0.9,)], [(), (0.9,) * 20], seconds, [0.0, 1.0, 1.0], 2, 24).depths == [0, 0]


@pytest.mark.parametrize("behind", [0, 1000])
def test_while_nothing_pays_little_time_is_spent_on_finding_out(behind: int) -> None:
    depths = DraftDepths()
    seconds = [1 + 0.1 * count for count in range(20)]
    for tokens, took in ((1, 0.05), (129, 0.4)):
        depths.observe(1, tokens, took)
    drafted, steps = 0, 4000
    for _ in range(steps):
        [depth], _ = depths.choose([(0.01,)], [()], seconds, 1, 8, [behind])
        drafted += depth
        for _ in range(depth):
            depths.observe(1, 1, 0.05)
    assert 0 < drafted * (0.15 + behind / 128 * 0.4) < 1.2 * steps * Exploration.SHARE


def test_now_and_then_a_step_goes_without_the_model() -> None:
    depths = DraftDepths()
    chosen = [depths.choose([(0.9, 0.8)], [()], [1.0, 1.1, 1.2], 1, 8, [0]).depths[0] for _ in range(640)]
    assert chosen[: DraftDepths.PLAIN] == [0] * DraftDepths.PLAIN
    assert chosen.count(0) == DraftDepths.PLAIN + 10


def test_a_step_without_room_has_the_model_draft_nothing() -> None:
    depths = DraftDepths()
    chosen = [depths.choose([(0.5,)], [()], [1.0], 1, 0, [100]).depths for _ in range(40)]
    assert chosen == [[0]] * 40


def test_steps_for_which_a_device_got_ready_do_not_count() -> None:
    """A step of the target takes a second, two thirds of what is drafted survive; a draft step takes 10 s at first."""
    survival, seconds = (0.66, 0.44), [1.0, 1.0, 1.0]
    counted, ready = DraftDepths(), DraftDepths((1, 2, 4))
    for depths in (counted, ready):
        for took in (10.0, 10.0, 0.1):
            depths.observe(1, 2, took)
            depths.observe(1, 1, took)
        depths.observe(1, 300, 20.0)
        plans = [depths.choose([survival], [()], seconds, 1, 8, [1]) for _ in range(6)]
        drafted = [sum(plan.depths) for plan in plans[DraftDepths.PLAIN :]]
        assert drafted == ([0, 0, 0] if depths is counted else [2, 2, 2])
