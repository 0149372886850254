"""Tests deadlines: the earliest that can be met goes first within a tenant's line, and what has not begun in time
ends."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import Scheduler, Sequence, SequenceParams, check
from penstock.core.deadlines import LOOKED_AT, expire, refuse_hopeless
from penstock.core.step_cost import CostModel
from penstock.types import Claim, Failed, Finished
from tests.core.test_step_cost import learned, taken
from tests.core.world import limits, run, step


def test_the_earliest_deadline_or_target_goes_first_and_all_of_them_before_those_without() -> None:
    scheduler = Scheduler(limits(max_rows=1))
    claims = [Claim(), Claim(deadline=9.0), Claim(ttft=3.0), Claim(deadline=5.0, ttft=20.0), Claim()]
    events = run(scheduler, *(Sequence(id, (id,), 1, SequenceParams(claim=claim)) for id, claim in enumerate(claims)))
    assert [event.seq for event in events if isinstance(event, Finished)] == [2, 3, 1, 0, 4]


def test_deadlines_do_not_change_the_shares_of_tenants() -> None:
    scheduler = Scheduler(limits(max_rows=1))
    hurried = [Sequence(id, (id,) * 9, 1, SequenceParams(claim=Claim("hurried", deadline=1.0))) for id in range(4)]
    patient = [Sequence(id, (id,) * 9, 1, SequenceParams(claim=Claim("patient"))) for id in range(4, 8)]
    events = run(scheduler, *hurried, *patient)
    ended = [event.seq < 4 for event in events if isinstance(event, Finished)]
    assert ended == [True, False] * 4


def test_what_has_not_begun_by_its_deadline_ends_and_what_has_goes_on() -> None:
    scheduler = Scheduler(limits(max_rows=1))
    for id, deadline in ((1, 2.0), (2, 2.0), (3, 4.0), (4, None)):
        scheduler.add(Sequence(id, (id,) * 3, 9, SequenceParams(claim=Claim(deadline=deadline))))
    scheduler.abort(2)
    scheduler.add(Sequence(5, (5,), 9, SequenceParams(claim=Claim(deadline=3.0))))
    scheduler.add(
        Sequence(6, (6,), 9, SequenceParams(claim=Claim(deadline=3.0)), generated=(7,))
    )  # another engine has begun it
    step(scheduler)
    scheduler.now = 2.5
    assert expire(scheduler) == []
    scheduler.now = 4.0
    failed = expire(scheduler)
    assert [(event.seq, event.code) for event in failed if isinstance(event, Failed)] == [
        (5, "wait_too_long"),
        (3, "wait_too_long"),
    ]
    check(scheduler)
    assert scheduler.sequences.keys() == {1, 4, 6}


# -- what cannot be in time ---------------------------------------------------------------------------------------

SOME = limits(max_len=3000, max_rows=1, step_tokens=512, block_size=16, num_blocks=2000)


def waiting(scheduler: Scheduler) -> list[int]:
    return [seq.id for tenant in scheduler.tenants for seq in tenant.line]


def test_what_can_be_in_time_goes_before_what_cannot_any_more() -> None:
    """A prompt of 2,000 tokens takes more than a second."""
    scheduler, costs = Scheduler(SOME), learned()
    long = costs.prompt_seconds(2000)
    for id, tokens, due in ((1, 2000, 0.9 * long), (2, 2000, 1.1 * long), (3, 16, 2.0 * long), (4, 16, None)):
        scheduler.add(Sequence(id, (id,) * tokens, 1, SequenceParams(claim=Claim(ttft=due))))
    refuse_hopeless(scheduler, CostModel())  # nothing is known of costs yet
    assert waiting(scheduler) == [1, 2, 3, 4]
    refuse_hopeless(scheduler, costs)
    assert waiting(scheduler) == [2, 3, 1, 4]
    scheduler.now = 0.2 * long
    refuse_hopeless(scheduler, costs)
    assert waiting(scheduler) == [3, 1, 2, 4]  # as those without a target: in order of arrival
    check(scheduler)


def test_a_cached_prompt_is_in_time_and_one_that_has_answered_keeps_its_place() -> None:
    scheduler, costs = Scheduler(SOME), learned()
    run(scheduler, Sequence(1, (7,) * 2000, 1))
    scheduler.add(Sequence(2, (7,) * 2000, 1, SequenceParams(claim=Claim(ttft=costs.prompt_seconds(100)))))
    refuse_hopeless(scheduler, costs)
    assert scheduler.sequences[2].standing.due < inf
    begun = Sequence(3, (8,) * 16, 9, SequenceParams(claim=Claim(ttft=0.5)))
    scheduler.abort(2)
    scheduler.add(begun)
    step(scheduler)
    scheduler.preempt(begun)
    scheduler.now = 1.0
    refuse_hopeless(scheduler, costs)
    assert begun.standing.due == 0.5


def test_a_deadline_that_a_prompt_cannot_meet_alone_is_refused_at_once() -> None:
    scheduler, costs = Scheduler(SOME), learned()
    long = costs.prompt_seconds(2000)
    for id, deadline in ((1, 0.8 * long), (2, 1.2 * long)):
        scheduler.add(Sequence(id, (id,) * 2000, 1, SequenceParams(claim=Claim(deadline=deadline))))
    scheduler.add(
        Sequence(3, (3,) * 2000, 2, SequenceParams(claim=Claim(deadline=0.1)), generated=(4,))
    )  # resumed in a new engine
    (failed,) = refuse_hopeless(scheduler, costs)
    assert isinstance(failed, Failed)
    assert (failed.seq, failed.code) == (1, "wait_too_long")
    assert failed.retry_after == pytest.approx(0.2 * long)
    assert f"takes about {long:.3g} s" in failed.message
    assert f"{0.8 * long:.3g} s are left" in failed.message
    check(scheduler)
    scheduler.now = 0.3 * long
    assert [event.seq for event in refuse_hopeless(scheduler, costs)] == [2]  # others kept it waiting
    assert waiting(scheduler) == [3]


def test_what_was_preempted_before_its_first_token_misses_its_deadline_and_goes_on() -> None:
    scheduler, costs = Scheduler(SOME), learned()
    scheduler.add(begun := Sequence(1, (1,) * 2000, 1, SequenceParams(claim=Claim(deadline=1.0))))
    step(scheduler)
    scheduler.preempt(begun)
    scheduler.now = 0.9
    for _ in range(2):
        assert refuse_hopeless(scheduler, costs) == []
        assert begun.standing.due == inf


def test_what_missed_its_target_is_still_refused_when_it_misses_its_deadline() -> None:
    scheduler, costs = Scheduler(SOME), learned()
    long = costs.prompt_seconds(2000)
    scheduler.add(Sequence(1, (1,) * 2000, 1, SequenceParams(claim=Claim(ttft=0.5 * long, deadline=1.5 * long))))
    assert refuse_hopeless(scheduler, costs) == []
    assert scheduler.sequences[1].standing.due == inf
    scheduler.now = 0.6 * long
    assert [event.seq for event in refuse_hopeless(scheduler, costs)] == [1]


def test_no_more_of_a_line_is_looked_at_than_can_start() -> None:
    """Those that cannot be in time are found behind as many as are looked at once the line has moved on."""
    scheduler, costs = Scheduler(SOME), learned()
    for id in range(LOOKED_AT):
        scheduler.add(Sequence(id, (id,) * 9, 1, SequenceParams(claim=Claim(ttft=0.1))))
    scheduler.add(Sequence(50, (50,) * 2000, 1, SequenceParams(claim=Claim(ttft=0.2))))
    refuse_hopeless(scheduler, costs)
    assert scheduler.sequences[50].standing.due < inf
    step(scheduler)
    refuse_hopeless(scheduler, costs)
    assert scheduler.sequences[50].standing.due == inf


claims = st.tuples(st.integers(1, 1500), st.none() | st.floats(0.0, 3.0), st.floats(0.0, 4.0))


@given(st.lists(claims, min_size=1, max_size=20))
def test_nothing_hopeless_starts_while_another_can_be_in_time(asked: list[tuple[int, float | None, float]]) -> None:
    """On a virtual clock, with prompts of any length that come at any time: what starts can have its first token by
    when it is wanted, unless nothing that waits with a target can."""
    costs, scheduler = learned(), Scheduler(SOME)
    arrivals = sorted((at, id, tokens, due) for id, (tokens, due, at) in enumerate(asked))

    def can_be_in_time(seq: Sequence, now: float) -> bool:
        wanted = [time for time in (seq.params.claim.ttft, seq.params.claim.deadline) if time is not None]
        return bool(wanted) and now + costs.prompt_seconds(seq.prompt_len) <= seq.times.arrived + min(wanted)

    while arrivals or scheduler.sequences:
        if arrivals and not scheduler.sequences:
            scheduler.now = max(scheduler.now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= scheduler.now:
            _, id, tokens, due = arrivals.pop(0)
            scheduler.add(Sequence(id, (id,) * tokens, 1, SequenceParams(claim=Claim(ttft=due))))
        refuse_hopeless(scheduler, costs)
        before = {id: scheduler.sequences[id] for id in waiting(scheduler)}
        plan, _ = step(scheduler)
        started = [before[row.seq] for row in plan.rows if row.seq in before]
        left = [seq for seq in before.values() if seq not in started]
        if any(can_be_in_time(seq, scheduler.now) for seq in left):
            assert all(can_be_in_time(seq, scheduler.now) for seq in started)
        scheduler.now += taken(plan.rows)
