"""Tests who goes next at the gateway: shares, targets that can be met, and who need not wait."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequest
from penstock.fleet.ledger import Load
from penstock.fleet.queue import AHEAD, GatewayQueue, has_room
from penstock.fleet.timing import EngineTiming
from penstock.types import Claim, Request, SamplingParams
from tests.core.world import limits

SECONDS = 0.001  # for a prompt token


def request(id: int, **fields: object) -> Request:
    return Request(id, (1,), SamplingParams(), 8)._replace(**fields)  # type: ignore[arg-type]


def queue(*requests: tuple[Request, int]) -> GatewayQueue:
    found = GatewayQueue(limits(), SECONDS)
    for each, work in requests:
        found.add(each, work)
    return found


def drained(waiting: GatewayQueue) -> list[int]:
    return [each.id for each in iter(waiting.pop, None)]


@given(st.lists(st.integers(1, 2000), min_size=40, max_size=40), st.sampled_from([1.0, 2.0, 4.0]))
def test_two_who_always_wait_get_work_by_their_weights(works: list[int], weight: float) -> None:
    claims = [Claim("a", weight), Claim("b")]
    waiting = queue(*((request(id, claim=claims[id % 2]), work) for id, work in enumerate(works)))
    had, left = Counter[str](), Counter({"a": 20, "b": 20})
    while min(left.values()):
        id = waiting.pop().id  # type: ignore[union-attr]
        tenant = claims[id % 2].tenant
        had[tenant] += works[id]
        left[tenant] -= 1
        assert abs(had["a"] / weight - had["b"]) <= max(works)


@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(0.1, 20.0) | st.none()), min_size=1, max_size=12))
def test_the_earliest_target_that_can_be_met_goes_first(asked: list[tuple[int, float | None]]) -> None:
    waiting = queue()
    requests = {id: (work, ttft) for id, (work, ttft) in enumerate(asked) if ttft is None or work * SECONDS < ttft / 2}
    for id, (work, ttft) in requests.items():
        waiting.add(request(id, claim=Claim(ttft=ttft)), work)
    ttfts = {id: inf if ttft is None else ttft for id, (_, ttft) in requests.items()}
    while (popped := waiting.pop()) is not None:
        due = ttfts.pop(popped.id)
        can = [other for id, other in ttfts.items() if waiting.now + requests[id][0] * SECONDS <= other]
        late = waiting.now + requests[popped.id][0] * SECONDS > due
        assert all(other == inf for other in can) if late else due <= min(can, default=inf)
        waiting.now += requests[popped.id][0] * SECONDS
    assert not ttfts


@given(st.data())
def test_every_request_leaves_once(data: st.DataObject) -> None:
    waiting, added, left = queue(), [], Counter[int]()
    for id in range(data.draw(st.integers(1, 30))):
        waiting.now += data.draw(st.floats(0, 1.0))
        claim = Claim(data.draw(st.sampled_from("ab")), deadline=data.draw(st.none() | st.floats(0.1, 3.0)))
        asked = request(id, claim=claim, priority=data.draw(st.integers(0, 1)))
        added.append(id)
        if data.draw(st.integers(0, 3)):
            waiting.add(asked, data.draw(st.integers(1, 500)))
        else:
            waiting.enter(asked, 1)
            assert not waiting.waits(id)
            left[id] += 1
        left.update(event.seq for event in waiting.expire())
        if data.draw(st.booleans()) and (popped := waiting.pop()) is not None:
            left[popped.id] += 1
            waiting.abort(popped.id)
        elif added and data.draw(st.booleans()) and (victim := added[-1]) in waiting.sequences:
            left[victim] += waiting.waits(victim)
            waiting.abort(victim)
    left.update(drained(waiting))
    assert left == Counter(added)
    assert len(waiting) == 0


def test_a_tenant_with_a_short_line_does_not_wait_for_anothers_long_one() -> None:
    waiting = queue(*((request(id, claim=Claim("many")), 1000) for id in range(50)))
    few = request(51, claim=Claim("few", ttft=5.0))
    assert waiting.is_first(few)
    assert not waiting.is_first(few._replace(background=True))
    waiting.add(few, 1000)
    assert not waiting.is_first(few)
    assert 51 in drained(waiting)[:2]


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 20))
def test_nobody_goes_for_whom_there_is_no_room_nor_passes_one_who_is_next(asked: list[bool], room: int) -> None:
    waiting = queue(*((request(id, background=later), 10) for id, later in enumerate(asked)))
    foreground = [id for id, later in enumerate(asked) if not later]

    def pop() -> Request | None:
        return waiting.pop(lambda each: not each.background and each.id < room)

    gone = [each.id for each in iter(pop, None)]
    assert gone == [id for at, id in enumerate(foreground) if all(before < room for before in foreground[: at + 1])]
    assert len(waiting) == len(asked) - len(gone)


def test_a_request_says_how_long_it_waited() -> None:
    waiting = queue((request(0), 10))
    waiting.now = 2.5
    waiting.enter(request(1, claim=Claim(deadline=1.0)), 10)
    waiting.pop()
    assert (waiting.waited(0), waiting.waited(1), waiting.waited(2)) == (2.5, 0.0, 0.0)
    waiting.now = 4.0
    assert waiting.is_overdue
    assert not waiting.expire()  # it was sent in time
    assert not waiting.is_overdue


def test_background_requests_wait_for_as_long_as_it_takes_and_go_last() -> None:
    waiting = queue((request(0, background=True, claim=Claim(ttft=0.1)), 1000), (request(1), 1000))
    assert not waiting.is_next(request(2))
    assert drained(waiting) == [1, 0]
    waiting.add(request(3, background=True), 1)
    assert waiting.is_next(request(4))
    assert not waiting.is_next(request(4, background=True))
    waiting.abort(3)
    assert waiting.is_next(request(4, background=True))
    with pytest.raises(InvalidRequest, match="request id 0 is already in use"):
        waiting.add(request(0), 1)


def test_answers_count_for_the_share() -> None:
    waiting = queue(*((request(id, claim=Claim("ab"[id % 2])), 100) for id in range(6)))
    assert [waiting.pop().id, waiting.pop().id] == [0, 1]  # type: ignore[union-attr]
    waiting.generated(0, 100)
    assert drained(waiting)[:2] == [3, 5]


def test_room_is_a_step_a_row_and_memory() -> None:
    timing = EngineTiming()
    one = Load(rows=1)
    assert has_room(Load(kv_tokens=timing.kv_tokens), timing)  # it has nothing to do, whatever it holds
    assert has_room(one, timing)
    assert not has_room(one._replace(queued=timing.step_tokens), timing)
    assert has_room(Load(rows=timing.max_rows), timing)  # one that waits there begins when another ends
    assert not has_room(Load(rows=timing.max_rows, waiting=timing.max_rows // AHEAD), timing)
    assert not has_room(one._replace(kv_tokens=timing.kv_tokens), timing)


@given(st.integers(1, 600), st.integers(0, 20_000))
def test_what_may_wait_never_keeps_others_out(requests: int, tokens: int) -> None:
    timing = EngineTiming()
    rows = min(requests, timing.max_rows // 2)
    load = Load(tokens, tokens, rows, 0, 0.0, requests - rows, requests, tokens)
    assert has_room(load, timing)
    assert has_room(load, timing, background=True) == (requests < 128 and tokens < timing.step_tokens)
