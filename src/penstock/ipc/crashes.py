"""Decides which requests may have caused an engine's death. A request that is blamed too often is poisoned, and fails.

If only one request can be the cause, or one of several was doubted before, that one is blamed. Two crashes in a row
poison it. It takes more if engines are killed, or also die without a request that could be the cause. So a poisoned
request ends two engines, or three if others were doubted with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from penstock.errors import PoisonedRequest
from penstock.ipc.dispatcher import Dispatcher
from penstock.ipc.request_stream import RequestStream
from penstock.ipc.trust import Trust, TrustEvent
from penstock.types import Event, Failed, Request

CRASH, KILL = 2, 1  # how much a request is blamed for a death; an engine that answers it clears it
MOST_BLAMED = 4, 6, 16  # before it fails, after 0, 1 and more unexplained deaths
REMEMBERED = 60.0  # seconds, of an unexplained death
POISONED = 64  # requests that are remembered as the reason of deaths


class LostRequests(NamedTuple):
    """The requests that a lost engine had not answered. They wait until the cause of its loss is known."""

    unanswered: list[RequestStream]
    answered: bool  # it had others, which it had answered
    reason: str  # how it was lost

    @property
    def suspected(self) -> bool:
        return any(stream.trust is Trust.LOST_DOUBTED for stream in self.unanswered)


class CrashJudge:
    """Clears, doubts and blames the requests of lost engines. `end` ends a request with an event."""

    def __init__(
        self, streams: Mapping[int, RequestStream], dispatcher: Dispatcher, end: Callable[[RequestStream, Event], None]
    ) -> None:
        self._streams = streams
        self._dispatcher = dispatcher
        self._end = end
        self._unexplained: deque[float] = deque(maxlen=2)  # when engines died for which no request was doubted
        self._poisoned: deque[int] = deque(maxlen=POISONED)  # fingerprints

    def refusal(self, request: Request) -> Failed | None:
        if not self._poisoned or _fingerprint(request) not in self._poisoned:
            return None
        return _failure(request.id, "it was refused at once this time")

    @property
    def blamed_twice(self) -> bool:
        return any(stream.blame >= 2 * CRASH for stream in self._streams.values())

    def clear(self, lost: LostRequests) -> None:
        self._explain(self._left(lost))

    def blame(
        self, lost: LostRequests, suspects: Collection[int] | None, *, crashed: bool, shared: bool = False
    ) -> None:
        """Doubts the requests that an engine was working on when it died: the `suspects`, or all if nobody knows. If it
        has not `crashed`, it was killed from outside, perhaps for lack of memory. If suspicion is `shared` with
        requests of other clients, only a request that was doubted before is blamed."""
        left = self._left(lost)
        doubted = left if suspects is None else [stream for stream in left if stream.id in suspects]
        if not doubted and (not lost.answered or (crashed and not suspects and self._unexplained_deaths)):
            doubted = left  # it died before it could note its suspects, or does so again and again
        if suspects is not None:
            _accuse(doubted, crashed, shared)
        if not doubted and (left or lost.answered):
            self._unexplained.append(time.monotonic())
        poisoned = self._poisoned_among(doubted)
        self._explain(left, () if poisoned else doubted)  # once the cause is found, the others are trusted
        self._give_up(poisoned, lost.reason)

    def blame_late(self, lost: LostRequests, suspects: Collection[int], *, crashed: bool) -> None:
        """Blames a request of an engine whose death nobody could explain in time, if no other can be the reason. It may
        be tried on another engine by now, or have ended that one too; if one has answered it, it is not blamed."""
        states = (Trust.DOUBTED, Trust.LOST_DOUBTED)
        doubted = [stream for stream in self._left(lost) if stream.trust in states and stream.id in suspects]
        if len(doubted) == 1:
            doubted[0].blame += CRASH if crashed else KILL
        self._give_up(self._poisoned_among(doubted), lost.reason)

    def _left(self, lost: LostRequests) -> list[RequestStream]:
        return [stream for stream in lost.unanswered if stream.id in self._streams]

    def _explain(self, lost: list[RequestStream], doubted: Collection[RequestStream] = ()) -> None:
        for stream in lost:
            stream.note(TrustEvent.DOUBT if stream in doubted else TrustEvent.CLEAR)
        if any(stream.trust is Trust.DOUBTED for stream in lost):
            self._dispatcher.recover()

    def _poisoned_among(self, doubted: list[RequestStream]) -> list[RequestStream]:
        most = MOST_BLAMED[self._unexplained_deaths]
        return [stream for stream in doubted if stream.blame >= most]

    @property
    def _unexplained_deaths(self) -> int:
        return sum(time.monotonic() - when < REMEMBERED for when in self._unexplained)

    def _give_up(self, poisoned: list[RequestStream], reason: str) -> None:
        for stream in poisoned:
            self._dispatcher.recall(stream)
            self._poisoned.append(_fingerprint(stream.journal.request))
            self._end(stream, _failure(stream.id, f"the last time, {reason}"))


def _accuse(doubted: list[RequestStream], crashed: bool, shared: bool) -> None:
    """Blames the doubted request that is the only possible cause, or that was doubted before: one is tried at a time,
    and others have only come to its engine since."""
    known = [stream for stream in doubted if stream.trust is Trust.LOST_DOUBTED] or ([] if shared else doubted)
    if len(known) == 1:
        known[0].blame += CRASH if crashed else KILL


def _fingerprint(request: Request) -> int:
    return hash((request.prompt, request.sampling.grammar, request.adapters, request.pooling))


def _failure(id: int, what: str) -> Failed:
    message = f"the engine has died again and again when it worked on this request; {what}: do not send it again"
    return Failed(id, PoisonedRequest.code, message)
