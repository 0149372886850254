"""Tests what the policy decides: an order that may change at any time, and requests that may wait."""

from __future__ import annotations

from penstock.core import Scheduler, Sequence, StandardPolicy
from penstock.core.check import check
from penstock.core.policy import ServingLoad
from penstock.types import Finished, Limits
from tests.core.world import counts, limits, run, step


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return (first, *range(1, length))


class Deadlines(StandardPolicy):
    """Serves those first that have least time left; who is past its deadline comes last."""

    dynamic = True

    def __init__(self, limits: Limits, deadlines: dict[int, float]) -> None:
        super().__init__(limits)
        self._deadlines = deadlines

    def order(self, seq: Sequence, now: float) -> tuple[bool, int, int]:
        late = now > self._deadlines[seq.id]
        return (late, int(self._deadlines[seq.id]), seq.arrival)


def test_an_order_that_time_changes_is_followed() -> None:
    some = limits(max_rows=1)
    scheduler = Scheduler(some, policy=Deadlines(some, {1: 10.0, 2: 20.0, 3: 15.0}))
    for id in (1, 2, 3):
        scheduler.add(Sequence(id, prompt(3), 1))
    scheduler.now = 12.0  # too late for 1
    ended = [event.seq for event in run(scheduler) if isinstance(event, Finished)]
    assert ended == [3, 2, 1]


def test_sequences_leave_wherever_they_stand_after_the_order_has_changed() -> None:
    some = limits(max_rows=2, num_blocks=64)
    deadlines = {id: 10.0 + id for id in range(6)}
    scheduler = Scheduler(some, policy=Deadlines(some, deadlines))
    for id in range(6):
        scheduler.add(Sequence(id, prompt(5, first=id), 9))
    step(scheduler)
    deadlines.update({id: 10.0 - id for id in range(6)})
    for id in (1, 3, 5, 0):
        assert [event.seq for event in scheduler.abort(id)] == [id]
        check(scheduler)
    assert {event.seq for event in run(scheduler) if isinstance(event, Finished)} == {2, 4}


def test_the_policy_chooses_who_loses_its_memory() -> None:
    class First(StandardPolicy):
        def victim(self, running: object, first: int, now: float) -> Sequence:
            return scheduler.running[first]

    some = limits(num_blocks=8, max_len=32, max_rows=3)
    scheduler = Scheduler(some, policy=First(some))
    events = run(scheduler, *(Sequence(id, prompt(5, first=id), 20) for id in range(3)))
    lost = {event.seq: event.report.preemptions for event in events if isinstance(event, Finished) and event.report}
    assert lost[0] == 0
    assert lost[1] > lost[2]


# -- background --------------------------------------------------------------------------------------------------


def background(id: int, length: int = 3, max_tokens: int = 5) -> Sequence:
    return Sequence(id, prompt(length, first=id), max_tokens, background=True)


def test_background_requests_have_at_most_half_of_the_rows() -> None:
    scheduler = Scheduler(limits(max_rows=8, step_tokens=64, num_blocks=64))
    for id in range(8):
        scheduler.add(background(id))
    assert list(counts(step(scheduler)[0])) == [0, 1, 2, 3]


def test_background_requests_start_after_and_are_preempted_before_all_others() -> None:
    scheduler = Scheduler(limits(max_rows=2, num_blocks=64))
    scheduler.add(Sequence(1, prompt(3), 1, priority=7))
    scheduler.add(background(2))
    scheduler.add(Sequence(3, prompt(3), 1, priority=9))
    assert list(counts(step(scheduler)[0])) == [1, 3]
    small = Scheduler(limits(max_rows=2, num_blocks=8, max_len=32))
    small.add(background(1, length=9, max_tokens=20))
    step(small)
    events = run(small, Sequence(2, prompt(9), 20, priority=99))
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
    assert policy.may_start(seq, 1, ServingLoad(0, 0, 5), 0.0)
    assert not policy.may_start(seq, 1, ServingLoad(1, 1, 0), 0.0)
    assert not policy.may_start(seq, 0, ServingLoad(0, 0, 0), 0.0)
