"""Holds requests back at a gateway while every replica has enough to do, and returns them in the queue's order.

For the thread of one event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable

from penstock.fleet.queue import GatewayQueue
from penstock.fleet.scale import LoadMeter, MeasuredLoad
from penstock.fleet.view import FleetView
from penstock.types import Event, Limits, Request, Tokens

LATE = 0.005  # seconds after a deadline at which it is looked at: the loop's clock is not exact

AT_ONCE, WAITED, EXPIRED, LEFT = "at_once", "waited", "expired", "left"  # outcomes of a request here


class GatewayLine:
    """Decides when a request goes to a replica. It calls `advance` soon after a request began to wait, and `end` with
    the failures of requests that waited for too long."""

    def __init__(
        self, view: FleetView, limits: Limits, advance: Callable[[], None], end: Callable[[Iterable[Event]], None]
    ) -> None:
        self.counts: Counter[str] = Counter()  # requests by outcome
        self.seconds = 0.0  # total wait of all requests
        self._view = view
        self._advance = advance
        self._end = end
        self._queue = GatewayQueue(limits)
        self._meter = LoadMeter()

    def __len__(self) -> int:
        return len(self._queue)

    def may_go(self, request: Request, salt: str, avoid: int | None) -> bool:
        """Returns whether a request may go to a replica other than `avoid` now. If not, it waits for `next`. A request
        that was sent before goes at once."""
        queue = self._queue
        if request.id in queue.sequences:
            return not queue.waits(request.id)
        if queue.is_next(request) and self._view.has_room(request, avoid):
            return True
        if self._view.open_replicas and queue.is_first(request):
            return True
        self._wait(request, salt)
        return False

    def next(self, avoid: int | None) -> Request | None:
        """Returns the request whose turn it is; None: nobody waits, or no replica but `avoid` has room for it."""
        queue = self._queue
        if not len(queue):
            return None
        queue.now, queue.seconds_per_token = time.monotonic(), self._view.seconds_per_token
        request = queue.pop(lambda request: self._view.has_room(request, avoid))
        if request is not None:
            self.counts[WAITED] += 1
            self.seconds += queue.waited(request.id)
        return request

    def waited(self, id: int) -> float:
        """Returns the seconds that a request has waited here."""
        return self._queue.waited(id)

    def enter(self, request: Request, work: int) -> None:
        """Counts a request that is sent to a replica, which computes `work` tokens of its prompt."""
        queue = self._queue
        if request.id not in queue.sequences:
            queue.now = time.monotonic()
            queue.enter(request, work)
            self._meter.arrive(len(request.prompt), work, queue.now)
            if queue.is_overdue:
                asyncio.get_running_loop().call_soon(self._expire)
            self.counts[AT_ONCE] += 1

    def charge(self, answers: Iterable[Tokens]) -> None:
        if len(self._queue):
            for event in answers:
                self._queue.generated(event.seq, len(event.tokens))

    def forget(self, id: int, generated: int) -> None:
        if self._queue.waits(id):
            self.counts[LEFT] += 1
        elif generated:
            self._meter.end(generated, time.monotonic())
        self._queue.abort(id)

    def note_refused(self, request: Request, salt: str) -> None:
        """Counts a request that was refused as part of the load: replicas are started for it, too."""
        self._meter.arrive(len(request.prompt), self._view.uncached(request, salt), time.monotonic())

    def measured(self) -> MeasuredLoad:
        return MeasuredLoad(self._meter.load(len(self._queue), time.monotonic()), self._view.timing)

    def _wait(self, request: Request, salt: str) -> None:
        self._queue.now, work = time.monotonic(), self._view.uncached(request, salt)
        self._queue.add(request, work)
        self._meter.arrive(len(request.prompt), work, self._queue.now)
        loop = asyncio.get_running_loop()
        if request.claim.deadline is not None:
            loop.call_later(request.claim.deadline + LATE, self._expire)
        loop.call_soon(self._advance)

    def _expire(self) -> None:
        self._queue.now = time.monotonic()
        failed = self._queue.expire()
        self.counts[EXPIRED] += len(failed)
        self._end(failed)
