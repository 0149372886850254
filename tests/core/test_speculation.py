"""Tests what drafts are expected to be worth, what steps cost, and that the chosen lengths are the best."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.drafting.lengths import (
    FLOOR,
    MOST,
    NOTHING,
    Acceptance,
    Exploration,
    Proposal,
    StepCost,
    StreamAcceptance,
    cells_of,
    draft_lengths,
)
from penstock.core.drafting.suffixes import ALIKE, DIFFERENT, SINGLE

SURVIVAL = st.lists(st.sampled_from((0.1, 0.3, 0.5, 0.8, 0.9, 0.99, 1.0)), max_size=4).map(
    lambda rates: tuple(accumulate(rates, float.__mul__))
)
SECONDS = st.lists(st.sampled_from((0.0, 0.1, 0.5, 1.0, 3.0)), min_size=16, max_size=16)


def matched(match: int, agreement: int = SINGLE) -> Proposal:
    """Returns a proposal as far as learning is about it."""
    return Proposal((), (), "text", match, cells_of(match, [agreement] * MOST))


def survival_of(
    stream: StreamAcceptance, match: int, agreement: int = SINGLE, source: str = "text"
) -> tuple[float, ...]:
    return stream.survival(source, cells_of(match, [agreement] * MOST))


def proposal(survival: Sequence[float]) -> Proposal:
    return Proposal(tuple(range(len(survival))), tuple(survival), "text", 3)


def measured(rows: int, rises: Sequence[float]) -> tuple[StepCost, list[float]]:
    """Returns costs that were measured for each number of tokens, and the seconds themselves."""
    cost, seconds = StepCost(), list(accumulate(rises, initial=2.0))
    for more, took in enumerate(seconds):
        cost.observe(rows, rows + more, took)
    return cost, seconds


def rate(survivals: Sequence[Sequence[float]], lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """Returns the expected tokens per second."""
    gained = sum(sum(survival[:length]) for survival, length in zip(survivals, lengths, strict=True))
    return (len(survivals) + gained) / seconds[sum(lengths)]


@given(st.lists(SURVIVAL, min_size=1, max_size=3), SECONDS, st.integers(0, 12))
def test_lengths_are_the_best_of_all(survivals: list[tuple[float, ...]], rises: list[float], budget: int) -> None:
    cost, seconds = measured(len(survivals), rises)
    rows = len(survivals)
    lengths = draft_lengths([proposal(survival) for survival in survivals], cost, rows, rows, budget)
    choices = product(*(range(len(survival) + 1) for survival in survivals))
    best = max(rate(survivals, choice, seconds) for choice in choices if sum(choice) <= budget)
    assert sum(lengths) <= budget
    assert rate(survivals, lengths, seconds) == pytest.approx(best)


@given(st.lists(SURVIVAL, min_size=2, max_size=4), SECONDS)
def test_a_row_that_is_likelier_in_every_place_drafts_as_much(
    survivals: list[tuple[float, ...]], rises: list[float]
) -> None:
    better = tuple(min(1.0, 1.1 * survival) for survival in survivals[0])
    cost, _ = measured(len(survivals), rises)
    rows = len(survivals)
    lengths = draft_lengths([proposal(survival) for survival in (better, *survivals[:-1])], cost, rows, rows, 16)
    assert lengths[0] >= lengths[1]


@given(SURVIVAL, SECONDS)
def test_the_best_rate_rises_with_survival(survival: tuple[float, ...], rises: list[float]) -> None:
    cost, seconds = measured(1, rises)
    better = tuple(min(1.0, 1.1 * chance) for chance in survival)
    rates = [
        rate([chances], draft_lengths([proposal(chances)], cost, 1, 1, 16), seconds) for chances in (survival, better)
    ]
    assert rates[1] >= rates[0]


def test_lengths_pass_over_a_step_that_is_dear_to_one_that_pays() -> None:
    """Two tokens more cost as much as eight more: the first of them alone do not pay."""
    cost, _ = measured(1, [2.0, *[0.0] * 15])
    assert draft_lengths([proposal([0.9] * 2)], cost, 1, 1, 16) == [2]
    assert draft_lengths([proposal([0.6] * 1)], cost, 1, 1, 16) == [0]
    assert draft_lengths([proposal([0.6] * 4)], cost, 1, 1, 16) == [4]


def test_nothing_is_drafted_without_a_proposal() -> None:
    assert draft_lengths([NOTHING, NOTHING], StepCost(), 2, 2, 16) == [0, 0]
    assert draft_lengths([proposal([1.0])], StepCost(), 1, 1, 0) == [0]
    assert draft_lengths([NOTHING], StepCost(), 1, 1, 16, Exploration()) == [0]


def test_a_proposal_can_be_cut() -> None:
    whole = Proposal((1, 2, 3), (0.9, 0.8, 0.7), "text", 4, cells_of(4, [SINGLE] * 3))
    assert whole.first(2) == Proposal((1, 2), (0.9, 0.8), "text", 4, whole.cells[:2])


def test_equally_likely_slots_are_shared_out_within_the_budget() -> None:
    cost = StepCost(slope=0.0)
    assert draft_lengths([proposal([0.5, 0.5]), NOTHING, proposal([0.5, 0.5])], cost, 3, 3, 3) == [2, 0, 1]


def test_costs_are_interpolated_and_never_fall() -> None:
    cost = StepCost(slope=0.1)
    assert cost.curve(1, 1, 2)[:3] == pytest.approx([1.0, 1.1, 1.2])
    cost.observe(1, 1, 4.0)
    assert cost.curve(1, 1, 2)[:3] == pytest.approx([4.0, 4.4, 4.8])
    cost.observe(1, 5, 8.0)
    assert cost.curve(1, 1, 5)[:6] == pytest.approx([4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    cost.observe(1, 3, 1.0)
    assert cost.curve(1, 1, 4)[:5] == pytest.approx([4.0, 4.0, 4.0, 4.5, 8.0])
    assert cost.curve(2, 2, 0)[0] == pytest.approx(2.5), "two rows cost what two tokens of one do"


def test_costs_of_steps_with_prompts_are_their_own() -> None:
    cost = StepCost(slope=0.5)
    assert cost.curve(2, 100, 1)[:2] == pytest.approx([1.0, 3.0])  # sizes beyond 64 are measured by eights
    cost.observe(2, 2, 1.0)
    assert cost.curve(2, 4, 0)[0] == pytest.approx(2.0)
    cost.observe(2, 104, 10.0)
    assert cost.curve(2, 104, 0)[0] == pytest.approx(10.0)
    assert cost.curve(2, 53, 0)[0] == pytest.approx(5.5)


def test_a_padded_shape_costs_the_same_for_all_that_fit_it() -> None:
    cost = StepCost(slope=0.5, shapes=(8, 16))
    cost.observe(1, 1, 1.0)
    cost.observe(1, 5, 2.0)
    for _ in range(60):
        cost.observe(1, 20, 9.0)
    cost.observe(4, 4, 1.5)
    assert cost.curve(2, 2, 0)[0] == pytest.approx(1 + 0.5 / 3), "steps that only decode are measured apart"
    curve = cost.curve(1, 1, 18)
    assert curve[1:8] == pytest.approx([2.0] * 7)
    assert curve[8] == curve[15] > 2.0
    assert curve[16:19] == pytest.approx([curve[16], curve[17], 8.5], abs=1.0)


def test_two_sizes_close_to_each_other_do_not_tell_what_larger_ones_cost() -> None:
    """That a step has drafts at all costs as much here as many more of them do."""
    cost = StepCost(slope=0.01, shapes=(64, 80, 96, 128, 256))
    cost.observe(64, 64, 8.0)
    cost.observe(64, 80, 12.0)
    assert cost.curve(64, 64, 192)[192] == pytest.approx(12.0 + 176 * 0.08)
    cost.observe(64, 96, 14.0)
    assert cost.curve(64, 64, 192)[192] == pytest.approx(14.0 + 160 * 0.08)
    cost.observe(64, 128, 15.0)
    assert cost.curve(64, 64, 192)[192] == pytest.approx(15.0 + 128 * 3 / 48)


def test_the_least_step_is_that_of_one_row_or_the_cheapest_measured() -> None:
    cost = StepCost(slope=0.01, shapes=(8, 64))
    cost.observe(64, 64, 8.0)
    assert cost.least == pytest.approx(8.0 - 63 * 0.08)
    cost.observe(8, 8, 2.0)
    assert cost.least == pytest.approx(2.0 - 7 * 0.02)
    drafts_alone = StepCost(shapes=(8, 64))
    drafts_alone.observe(8, 20, 0.5)
    assert drafts_alone.least == pytest.approx(0.5)


def test_a_padded_size_costs_no_more_than_a_larger_one() -> None:
    """Else one that was measured too dear would never be tried again."""
    cost = StepCost(shapes=(8, 16, 32))
    for _ in range(20):
        for tokens, seconds in ((4, 1.0), (8, 2.0), (16, 3.0), (32, 2.5)):
            cost.observe(4, tokens, seconds)
    assert cost.curve(4, 4, 12)[4] == pytest.approx(2.0, rel=0.02)
    assert cost.curve(4, 4, 12)[12] == pytest.approx(2.5, rel=0.02)


def test_a_step_that_was_held_up_hardly_counts() -> None:
    cost = StepCost()
    for _ in range(16):
        cost.observe(1, 1, 1.0)
    cost.observe(1, 1, 1000.0)
    assert cost.curve(1, 1, 0)[0] < 1.1
    for _ in range(200):
        cost.observe(1, 1, 3.0)
    assert cost.curve(1, 1, 0)[0] == pytest.approx(3.0, rel=0.05)


def test_exploring_loses_little_and_measures_further() -> None:
    """A token more costs a whole step and hardly survives. All the same it is tried, at most one second in 400."""
    cost, exploration = StepCost(slope=1.0), Exploration()
    cost.observe(1, 1, 1.0)
    lengths = [draft_lengths([proposal([0.05] * 8)], cost, 1, 1, 16, exploration)[0] for _ in range(8000)]
    assert {1, 2, 4, 8} <= set(lengths)
    assert 0 < sum(lengths) <= 8000 / 400 + 8


def test_exploring_finds_that_more_tokens_cost_nothing() -> None:
    cost, exploration, drafted = StepCost(slope=1.0), Exploration(), 0
    for _ in range(3000):
        (length,) = draft_lengths([proposal([0.9] * 8)], cost, 1, 1, 16, exploration)
        cost.observe(1, 1 + length, 1.0)
        drafted += length
    assert drafted > 6 * 3000


def test_exploring_finds_that_drafts_have_become_dear() -> None:
    """Steps of one token are taken for dear ones until one is measured again."""
    cost, exploration = StepCost(), Exploration()
    cost.observe(1, 1, 9.0)
    lengths = []
    for _ in range(3000):
        (length,) = draft_lengths([proposal([0.5] * 2)], cost, 1, 1, 16, exploration)
        cost.observe(1, 1 + length, 1.0 + 5 * length)
        lengths.append(length)
    assert lengths[0] == 2
    assert sum(lengths[-1000:]) < 30


def test_survival_falls_with_depth_and_rises_with_the_match() -> None:
    stream = StreamAcceptance(Acceptance())
    short, long = survival_of(stream, 1), survival_of(stream, 40)
    assert list(short) == sorted(short, reverse=True)
    assert len(short) < len(long) == MOST
    assert all(one < other for one, other in zip(short, long, strict=False))
    assert short[-1] >= FLOOR


def test_survival_is_learned() -> None:
    shared = Acceptance()
    for _ in range(1000):
        stream = StreamAcceptance(shared)
        stream.observe(matched(2), 0, 1, True)
        stream.observe(matched(9), 0, 8, False)
    stream = StreamAcceptance(shared)
    assert survival_of(stream, 2)[0] == pytest.approx(1.0, abs=0.05)
    assert survival_of(stream, 2)[1:] == ()
    assert survival_of(stream, 9)[7] > 0.95
    assert survival_of(stream, 2, source="recent")[0] < 0.9, "each source is learned by itself"


def test_survival_is_learned_apart_by_agreement() -> None:
    shared = Acceptance()
    stream = StreamAcceptance(shared)
    before = [survival_of(stream, 2, agreement)[0] for agreement in (DIFFERENT, SINGLE, ALIKE)]
    assert before == sorted(before)
    for _ in range(200):
        StreamAcceptance(shared).observe(matched(2, DIFFERENT), 0, 1, False)
        StreamAcceptance(shared).observe(matched(2, ALIKE), 0, 0, True)
    after = [survival_of(stream, 2, agreement)[0] for agreement in (DIFFERENT, SINGLE, ALIKE)]
    assert after[0] > 0.9
    assert after[1] == before[1]
    assert after[2] < 0.1


def test_at_least_one_token_is_proposed_so_that_learning_goes_on() -> None:
    stream = StreamAcceptance(Acceptance())
    for _ in range(1000):
        stream.observe(matched(1), 0, 0, True)
    assert len(survival_of(stream, 1)) == 1
    for _ in range(1000):
        stream.observe(matched(1), 0, 1, False)
    assert survival_of(stream, 1)[0] > 0.9


def test_one_stream_does_not_spoil_another() -> None:
    """One stream copies and one does not. Each is told apart within a few tokens."""
    shared = Acceptance()
    copies, writes = StreamAcceptance(shared), StreamAcceptance(shared)
    for _ in range(300):
        copies.observe(matched(3), 0, 4, False)
        writes.observe(matched(3), 0, 0, True)
    assert survival_of(copies, 3)[3] > 0.7
    assert survival_of(writes, 3)[0] < 0.15


def test_the_first_step_of_a_size_does_not_count_for_more_than_was_expected_of_it() -> None:
    cost = StepCost(slope=0.02, shapes=(1, 2, 4, 8))
    for _ in range(8):
        cost.observe(1, 1, 0.004)
    cost.observe(1, 8, 3.0)  # a device that has to get ready
    assert cost.curve(1, 1, 7)[7] < 0.01
    for _ in range(40):
        cost.observe(1, 8, 0.012)
    assert cost.curve(1, 1, 7)[7] > 0.011
