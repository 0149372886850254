"""Tests deadlines: the earliest goes first within a tenant's line, and what has not begun in time ends."""

from __future__ import annotations

from penstock.core import Scheduler, Sequence, check
from penstock.core.deadlines import expire
from penstock.types import Claim, Failed, Finished
from tests.core.world import limits, run, step


def test_the_earliest_deadline_or_target_goes_first_and_all_of_them_before_those_without() -> None:
    scheduler = Scheduler(limits(max_rows=1))
    claims = [Claim(), Claim(deadline=9.0), Claim(ttft=3.0), Claim(deadline=5.0, ttft=20.0), Claim()]
    events = run(scheduler, *(Sequence(id, (id,), 1, claim=claim) for id, claim in enumerate(claims)))
    assert [event.seq for event in events if isinstance(event, Finished)] == [2, 3, 1, 0, 4]


def test_deadlines_do_not_change_the_shares_of_tenants() -> None:
    scheduler = Scheduler(limits(max_rows=1))
    hurried = [Sequence(id, (id,) * 9, 1, claim=Claim("hurried", deadline=1.0)) for id in range(4)]
    patient = [Sequence(id, (id,) * 9, 1, claim=Claim("patient")) for id in range(4, 8)]
    events = run(scheduler, *hurried, *patient)
    ended = [event.seq < 4 for event in events if isinstance(event, Finished)]
    assert ended == [True, False] * 4


def test_what_has_not_begun_by_its_deadline_ends_and_what_has_goes_on() -> None:
    scheduler = Scheduler(limits(max_rows=1))
    for id, deadline in ((1, 2.0), (2, 2.0), (3, 4.0), (4, None)):
        scheduler.add(Sequence(id, (id,) * 3, 9, claim=Claim(deadline=deadline)))
    scheduler.abort(2)
    scheduler.add(Sequence(5, (5,), 9, claim=Claim(deadline=3.0)))
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
    assert scheduler.sequences.keys() == {1, 4}
