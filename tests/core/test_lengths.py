"""Tests what is learned of the lengths of answers."""

from __future__ import annotations

from itertools import count, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import Sequence, SequenceParams
from penstock.core.lengths import ASSUMED_FULL, ASSUMED_MEAN, BOUNDS, ENOUGH, MOST_KINDS, AnswerLengths, LengthCurve
from penstock.types import Claim

STOP = 9


def ended(answer: int, most: int, tenant: str = "") -> Sequence:
    """Returns a sequence whose answer has so many tokens and, if it may have more, came to its end there."""
    tokens = (1,) * answer if answer == most else (1,) * (answer - 1) + (STOP,)
    seq = Sequence(1, (1, 2, 3), most, SequenceParams(stop_ids=frozenset({STOP}), claim=Claim(tenant)))
    seq.tokens += tokens
    return seq


def taught(lengths: list[int], most: int = 4096, tenant: str = "") -> AnswerLengths:
    learned = AnswerLengths()
    for length in lengths:
        learned.end(ended(length, most, tenant))
    return learned


IDS = count(2)


def running(answer: int, most: int = 4096, tenant: str = "") -> Sequence:
    seq = Sequence(next(IDS), (1, 2, 3), most, SequenceParams(claim=Claim(tenant)))
    seq.tokens += [1] * answer
    return seq


def chance(learned: AnswerLengths, seq: Sequence, more: int) -> float:
    return learned.survival(seq, [more])[0]


def test_the_share_of_answers_that_get_longer_is_learned() -> None:
    random = Random(1)
    learned = taught([random.randint(1, 400) for _ in range(2000)])
    for length, more in ((0, 100), (0, 300), (100, 100), (200, 100), (300, 60)):
        assert chance(learned, running(length), more) == pytest.approx(1 - more / (400 - length), abs=0.12)


def test_while_nothing_is_known_an_answer_is_assumed_to_end_at_a_constant_rate() -> None:
    learned = AnswerLengths()
    assert chance(learned, running(0), int(ASSUMED_MEAN)) == pytest.approx(0.368, abs=0.001)
    assert chance(learned, running(900), int(ASSUMED_MEAN)) == pytest.approx(0.368, abs=0.001)
    assert chance(learned, running(0, 256), 256) == pytest.approx(1 - 256 / ASSUMED_FULL, abs=0.02)


def test_no_answer_gets_more_than_its_limit() -> None:
    learned = AnswerLengths()
    assert learned.survival(running(40, 64), [24, 25])[1] == 0
    assert chance(learned, running(40, 64), 24) > 0


def test_answers_that_were_cut_off_did_not_end() -> None:
    assert chance(taught([100] * 200, most=100), running(0, 100), 100) > 0.95
    assert chance(taught([100] * 200, most=101), running(0, 101), 100) < 0.5


def test_a_stop_token_at_the_limit_is_an_end() -> None:
    learned = AnswerLengths()
    for _ in range(100):
        seq = ended(99, 100)
        seq.tokens.insert(3, 1)
        learned.end(seq)
    assert chance(learned, running(0, 100), 100) < 0.5


def test_answers_that_still_run_count_as_well() -> None:
    """The first to end of many that began together are the shortest."""
    learned, late = taught([20] * 10), running(30)
    before = chance(learned, running(0), 30)
    for _ in range(40):
        learned.follow(running(30))
    assert chance(learned, running(0), 30) > before + 0.3
    learned.follow(late)
    once = chance(learned, running(0), 30)
    learned.follow(late)
    assert chance(learned, running(0), 30) == once


def test_a_tenant_has_its_own_curve_once_enough_answers_ended() -> None:
    learned = taught([400] * 100, tenant="long")
    for _ in range(ENOUGH - 1):
        learned.end(ended(10, 4096, "short"))
    assert chance(learned, running(0, tenant="short"), 200) > 0.4
    learned.end(ended(10, 4096, "short"))
    assert chance(learned, running(0, tenant="short"), 200) < 0.2
    assert chance(learned, running(0, tenant="long"), 200) > 0.8
    assert chance(learned, running(0, tenant="new"), 200) > 0.4


def test_what_was_long_ago_fades() -> None:
    learned = taught([20] * 500 + [300] * 1000)
    assert chance(learned, running(0), 200) > 0.8


def test_nothing_is_learned_from_answers_without_tokens_and_kinds_are_bounded() -> None:
    learned = AnswerLengths()
    learned.end(Sequence(1, (1,), 5))
    assert not learned._curves
    for tenant in range(MOST_KINDS + 9):
        learned.end(ended(5, 64, str(tenant)))
    assert len(learned._curves) == MOST_KINDS
    assert chance(learned, running(0, 64), 10) < 0.2


@given(st.lists(st.tuples(st.integers(1, 10**8), st.booleans()), max_size=20), st.integers(0, 10**8))
def test_chances_never_rise_and_stay_chances(lengths: list[tuple[int, bool]], length: int) -> None:
    curve = LengthCurve(ASSUMED_MEAN)
    for each, cut_off in lengths:
        curve.observe(0, each)
        curve.end(each, cut_off=cut_off)
    chances = curve.survival(length, BOUNDS)
    assert all(0 <= after <= before <= 1 for before, after in pairwise(chances))
