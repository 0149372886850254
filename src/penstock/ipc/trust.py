"""Defines how far a request is trusted when engines die: one state for each request, and a table of transitions.

Engines die because of a request, or for no fault of any. A request that its engine had answered is innocent. One that
was not answered yet waits until the cause of the death is known. It is then cleared or doubted, and only an answer ends
a doubt. The module is pure: it reads no clock and does no I/O.
"""

from __future__ import annotations

from enum import Enum


class Trust(Enum):
    """The state of one request."""

    NEW = "new"  # no engine has answered it yet, and it is not doubted
    ANSWERED = "answered"  # its engine has answered it
    RESUMED = "resumed"  # an engine that was lost had answered it; the next one has not yet
    LOST = "lost"  # a new request whose engine was lost: the cause is not known yet
    LOST_RESUMED = "lost resumed"  # the same for a resumed request
    LOST_DOUBTED = "lost doubted"  # the same for a doubted request
    DOUBTED = "doubted"  # an engine may have died because of it

    @property
    def waits_for_cause(self) -> bool:
        return self in (Trust.LOST, Trust.LOST_RESUMED, Trust.LOST_DOUBTED)


class TrustEvent(Enum):
    """Lists what can happen to the trust in a request."""

    ANSWER = "answer"  # its engine has answered it
    LOSS = "loss"  # its engine was lost
    CLEAR = "clear"  # the engine was not lost because of it
    DOUBT = "doubt"  # the engine may have been lost because of it


TRANSITIONS = {
    (Trust.NEW, TrustEvent.ANSWER): Trust.ANSWERED,
    (Trust.NEW, TrustEvent.LOSS): Trust.LOST,
    (Trust.ANSWERED, TrustEvent.LOSS): Trust.RESUMED,
    (Trust.RESUMED, TrustEvent.ANSWER): Trust.ANSWERED,
    (Trust.RESUMED, TrustEvent.LOSS): Trust.LOST_RESUMED,
    (Trust.LOST, TrustEvent.CLEAR): Trust.NEW,
    (Trust.LOST, TrustEvent.DOUBT): Trust.DOUBTED,
    (Trust.LOST_RESUMED, TrustEvent.CLEAR): Trust.RESUMED,
    (Trust.LOST_RESUMED, TrustEvent.DOUBT): Trust.DOUBTED,
    (Trust.LOST_DOUBTED, TrustEvent.CLEAR): Trust.DOUBTED,
    (Trust.LOST_DOUBTED, TrustEvent.DOUBT): Trust.DOUBTED,
    (Trust.DOUBTED, TrustEvent.ANSWER): Trust.ANSWERED,
    (Trust.DOUBTED, TrustEvent.LOSS): Trust.LOST_DOUBTED,
}


def after(state: Trust, event: TrustEvent) -> Trust:
    """Returns the next state; raises ValueError for an event that cannot happen in this state."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"a request that is {state.value} cannot have the event {event.value}") from None
