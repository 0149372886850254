"""Tests how far a request is trusted when engines die, as a table: every state with every event."""

from __future__ import annotations

import asyncio

import pytest

from penstock.ipc.request_stream import ANSWERS, RequestStream
from penstock.ipc.trust import Trust, TrustEvent, after
from penstock.types import Request, SamplingParams, Tokens

REFUSED = None
TABLE: dict[Trust, tuple[Trust | None, ...]] = {  # after ANSWER, LOSS, CLEAR, DOUBT
    Trust.NEW: (Trust.ANSWERED, Trust.LOST, REFUSED, REFUSED),
    Trust.ANSWERED: (REFUSED, Trust.RESUMED, REFUSED, REFUSED),
    Trust.RESUMED: (Trust.ANSWERED, Trust.LOST_RESUMED, REFUSED, REFUSED),
    Trust.LOST: (REFUSED, REFUSED, Trust.NEW, Trust.DOUBTED),
    Trust.LOST_RESUMED: (REFUSED, REFUSED, Trust.RESUMED, Trust.DOUBTED),
    Trust.LOST_DOUBTED: (REFUSED, REFUSED, Trust.DOUBTED, Trust.DOUBTED),
    Trust.DOUBTED: (Trust.ANSWERED, Trust.LOST_DOUBTED, REFUSED, REFUSED),
}
EVENTS = (TrustEvent.ANSWER, TrustEvent.LOSS, TrustEvent.CLEAR, TrustEvent.DOUBT)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", Trust)
def test_every_state_with_every_event(state: Trust, event: TrustEvent) -> None:
    expected = TABLE[state][EVENTS.index(event)]
    if expected is REFUSED:
        with pytest.raises(ValueError, match=f"is {state.value} cannot have the event {event.value}"):
            after(state, event)
    else:
        assert after(state, event) is expected


def test_only_an_answer_ends_a_doubt() -> None:
    doubted = {Trust.DOUBTED, Trust.LOST_DOUBTED}
    for state in doubted:
        following = {event: after(state, event) for event in EVENTS if TABLE[state][EVENTS.index(event)]}
        assert {event for event, state in following.items() if state not in doubted} <= {TrustEvent.ANSWER}


def test_a_request_waits_for_the_cause_exactly_while_it_can_be_cleared() -> None:
    for state, (*_, cleared, doubted) in TABLE.items():
        assert state.waits_for_cause == (cleared is not REFUSED) == (doubted is not REFUSED)


def test_an_engine_answers_with_its_second_delivery_and_takes_the_blame_away() -> None:
    async def test() -> None:
        stream = RequestStream(Request(1, (1,), SamplingParams(), 9), lambda _: None)
        stream.blame = 3
        for number in range(ANSWERS):
            assert (stream.trust, stream.blame, stream.begun) == (Trust.NEW, 3, number > 0)
            stream.take([Tokens(1, (5,))])
        assert (stream.trust, stream.blame) == (Trust.ANSWERED, 0)
        stream.take([Tokens(1, (5,))])
        stream.lose_engine()
        assert (stream.trust, stream.begun) == (Trust.RESUMED, False)

    asyncio.run(test())
