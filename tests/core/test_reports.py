"""Tests the report of a sequence: times, preemptions, and where its prompt diverged from the nearest recent one."""

from __future__ import annotations

import pytest

from penstock.core import Scheduler, Sequence, SequenceParams
from penstock.core.recent import RecentStreams
from penstock.types import Event, Finished, Nearest, Report
from tests.core.world import answer, limits, run


def ends(events: list[Event]) -> dict[int, Report]:
    return {event.seq: event.report for event in events if isinstance(event, Finished) and event.report}


def explained(id: int, *tokens: int, answer: int = 3, owner: str = "", salt: str = "") -> Sequence:
    return Sequence(id, tokens, answer, SequenceParams(explain=True, owner=owner), salt=salt)


def nearest(scheduler: Scheduler, seq: Sequence) -> Nearest | None:
    return ends(run(scheduler, seq))[seq.id].nearest


def test_times_are_of_the_clock_that_is_set() -> None:
    scheduler = Scheduler(limits(max_rows=1))
    scheduler.now = 1.0
    scheduler.add(Sequence(1, (1, 2), 2))
    scheduler.add(Sequence(2, (1, 2), 0))
    events: list[Event] = []
    for planned, committed in ((3.0, 7.0), (8.0, 15.0), (20.0, 26.0)):
        scheduler.now = planned
        plan = scheduler.plan()
        scheduler.now = committed
        events += answer(scheduler, plan)
    first, second = ends(events)[1], ends(events)[2]
    assert (first.queued, first.prefill, first.decode) == (2.0, 4.0, 8.0)
    assert (second.queued, second.prefill, second.decode) == (19.0, 6.0, 0.0)  # nothing was to be sampled


def test_one_that_never_ran_has_only_waited() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(Sequence(1, (1, 2), 2))
    scheduler.now = 5.0
    (event,) = scheduler.abort(1)
    assert event[1] == Report(queued=5.0)


@pytest.mark.usefixtures("overcommitted")
def test_what_a_preemption_cost() -> None:
    """Two sequences outgrow eight blocks of four: the later one is preempted and reuses some of its blocks."""
    scheduler = Scheduler(limits(max_len=24, num_blocks=8))
    reports = ends(run(scheduler, Sequence(1, tuple(range(9)), 15), Sequence(2, tuple(range(50, 59)), 15)))
    assert (reports[1].preemptions, reports[1].recomputed) == (0, 0)
    assert reports[2].preemptions == scheduler.stats().preemptions > 0
    assert 0 < reports[2].recomputed < 24 * reports[2].preemptions


def test_the_nearest_recent_stream_and_where_they_part() -> None:
    scheduler = Scheduler(limits())
    assert nearest(scheduler, explained(1, *range(10))) is None
    run(scheduler, Sequence(2, (*range(6), 60, 61), 3))
    parted = nearest(scheduler, explained(3, *range(6), 60, 71, 72))
    assert parted == Nearest(7, held=10, prompt=8, before=(0, 1, 2, 3, 4, 5, 60), had=(61, 50, 50), got=(71, 72))
    longer = nearest(scheduler, explained(4, *range(6), 60, 71, 72, 50, 50, 9))
    assert longer == Nearest(11, held=11, prompt=9, before=(3, 4, 5, 60, 71, 72, 50, 50), had=(), got=(9,))
    assert nearest(scheduler, explained(5, 99)) is None


def test_nobody_is_told_of_what_is_not_theirs() -> None:
    scheduler = Scheduler(limits())
    run(
        scheduler,
        Sequence(1, tuple(range(10)), 1, SequenceParams(owner="a")),
        Sequence(2, tuple(range(10)), 1, salt="b"),
    )
    assert nearest(scheduler, explained(3, *range(10), owner="c")) is None
    assert nearest(scheduler, explained(4, *range(9), owner="a", salt="b")) is None
    assert nearest(scheduler, explained(5, *range(9), owner="a")) == Nearest(9, 10, 10, tuple(range(1, 9)), (9,))


def test_nothing_is_told_of_one_that_left_nothing_to_share() -> None:
    scheduler = Scheduler(limits())
    run(scheduler, Sequence(1, tuple(range(10)), 0, prefix_cache=False))
    assert nearest(scheduler, explained(2, *range(9))) is None


def test_the_latest_of_those_as_near() -> None:
    scheduler = Scheduler(limits())
    for id, last in ((1, 70), (2, 80), (3, 90)):
        run(scheduler, Sequence(id, (1, 2, last), 1))
    parted = nearest(scheduler, explained(4, 1, 2, 3))
    assert parted is not None
    assert parted.had == (90,)


def test_what_is_remembered_is_bounded() -> None:
    recent = RecentStreams(streams=3, tokens=20)

    def keep(length: int, first: int) -> None:
        seq = Sequence(1, (first, *range(1, length)), 1)
        seq.computed = length
        recent.keep(seq)

    def known() -> list[int]:
        return [first for first in range(1, 9) if recent.nearest(Sequence(1, (first,), 1))]

    for first in range(1, 6):
        keep(4, first)
    assert known() == [3, 4, 5]
    keep(16, 6)
    assert known() == [5, 6]
    recent.keep(Sequence(1, (7,), 1))  # nothing of it was computed
    assert known() == [5, 6]
    keep(21, 8)  # more than all that may be kept
    assert known() == []
