"""Holds requests back at a gateway while every replica has enough to do, and sends them in the queue's order.

For the thread of one event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable

from penstock.fleet.queue import GatewayQueue
from penstock.fleet.replica import Replica
from penstock.fleet.scale import LoadMeter, MeasuredLoad
from penstock.fleet.view import FleetView
from penstock.ipc.streams import RequestStreams
from penstock.types import Limits, Request, Tokens

LATE = 0.005  # seconds after a deadline at which it is looked at: the loop's clock is not exact

AT_ONCE, WAITED, EXPIRED, LEFT = "at_once", "waited", "expired", "left"  # what becomes of a request here


class GatewayLine:
    """Decides when a request goes to a replica. `view` knows what these have to do, `streams` sends."""

    def __init__(self, view: FleetView, limits: Limits, streams: RequestStreams) -> None:
        self.counts: Counter[str] = Counter()  # requests by what became of them
        self.seconds = 0.0  # that requests have waited, all together
        self._view = view
        self._streams = streams
        self._queue = GatewayQueue(limits)
        self._meter = LoadMeter()
        self._looking = False  # advance is about to be called

    def __len__(self) -> int:
        """Returns how many requests wait."""
        return len(self._queue)

    def lets_go(self, request: Request, salt: str, avoid: int | None) -> bool:
        """Returns whether a request may be sent to a replica now, another one than that to avoid. If not, `advance`
        sends it when its turn comes. What was sent before goes on at once."""
        queue = self._queue
        if request.id in queue.sequences:
            return not queue.waits(request.id)
        if queue.is_next(request) and self._view.has_room(request, avoid):
            return True
        if self._view.open_replicas and queue.is_first(request):
            return True
        self._let_wait(request, salt)
        return False

    def sent(self, request: Request, work: int) -> float:
        """Takes note that a request is sent to a replica, which computes so many tokens of its prompt; returns the
        seconds that it has waited."""
        queue = self._queue
        if request.id not in queue.sequences:
            queue.now = time.monotonic()
            queue.enter(request, work)
            self._meter.arrive(len(request.prompt), work, queue.now)
            if queue.is_overdue:
                asyncio.get_running_loop().call_soon(self._expire)
            self.counts[AT_ONCE] += 1
        return queue.waited(request.id)

    def advance(self) -> None:
        """Sends those whose turn it is, as many as replicas have room for."""
        self._looking = False
        queue = self._queue
        if not len(queue):
            return
        queue.now, queue.seconds_per_token = time.monotonic(), self._view.seconds_per_token
        reserved = self._streams.reserved
        avoid = reserved.number if isinstance(reserved, Replica) else None
        while (request := queue.pop(lambda request: self._view.has_room(request, avoid))) is not None:
            waited = queue.waited(request.id)
            self.counts[WAITED] += 1
            self.seconds += waited
            if not self._streams.start(request.id, waited):
                return  # it goes when the doubted request was answered for which others stay away

    def charge(self, answers: Iterable[Tokens]) -> None:
        """Charges tenants with what was generated for them, while others wait for it."""
        if len(self._queue):
            for event in answers:
                self._queue.generated(event.seq, len(event.tokens))

    def forget(self, id: int, generated: int) -> None:
        """Takes note that a request has ended after so many tokens of its answer."""
        if self._queue.waits(id):
            self.counts[LEFT] += 1
        elif generated:
            self._meter.end(generated, time.monotonic())
        self._queue.abort(id)

    def note_refused(self, request: Request, salt: str) -> None:
        """Counts a request that was refused as part of the load: replicas are started for it, too."""
        self._meter.arrive(len(request.prompt), self._view.uncached(request, salt), time.monotonic())

    def measured(self) -> MeasuredLoad:
        """Returns what requests there are, and how fast replicas are."""
        return MeasuredLoad(self._meter.load(len(self._queue), time.monotonic()), self._view.timing)

    def _let_wait(self, request: Request, salt: str) -> None:
        self._queue.now, work = time.monotonic(), self._view.uncached(request, salt)
        self._queue.add(request, work)
        self._meter.arrive(len(request.prompt), work, self._queue.now)
        loop = asyncio.get_running_loop()
        if request.claim.deadline is not None:
            loop.call_later(request.claim.deadline + LATE, self._expire)
        if not self._looking:
            self._looking = True
            loop.call_soon(self.advance)

    def _expire(self) -> None:
        """Ends the requests whose deadline has passed while they waited here."""
        self._queue.now = time.monotonic()
        failed = self._queue.expire()
        self.counts[EXPIRED] += len(failed)
        self._streams.end(failed)
