"""Finds requests that an engine does not answer although it answers probes.

Honest answers may be slow: a long prompt, an answer that comes whole, a queue. So an engine is mute only if it has sent
no byte at all for longer than all of that could take, or if it keeps serving requests that came later and have longer
prompts. The module is pure: times come in, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

FIRST_SECONDS = 30.0  # grace for any first byte
PROMPT_SECONDS = 0.05  # longest time for each token of a prompt
ANSWER_SECONDS = 0.5  # longest time for each token of an answer that comes whole
OVERTAKEN = 3  # later requests with longer prompts, after whose answers one is not in a queue


class WaitingRequest(Protocol):
    """A request on an engine, without a first byte."""

    sent: float
    tokens: int  # prompt tokens
    whole: float  # tokens of an answer that comes whole, infinite if it has no limit; 0: it is streamed
    overtaken: int  # answers to later requests that have begun


W = TypeVar("W", bound="WaitingRequest")


def mute_requests(waiting: Iterable[W], heard: float, now: float) -> list[W]:
    """Returns the requests that the engine will not answer; it sent its last byte, on any connection, at `heard`."""
    found, longest = [], FIRST_SECONDS
    for request in sorted(waiting, key=lambda request: request.sent):
        longest += request.tokens * PROMPT_SECONDS + request.whole * ANSWER_SECONDS
        overtaken = not request.whole and request.overtaken >= OVERTAKEN and now - request.sent > FIRST_SECONDS
        if overtaken or now - max(request.sent, heard) > longest:
            found.append(request)
    return found
