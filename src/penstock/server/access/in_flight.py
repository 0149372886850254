"""Counts work in flight and refuses work beyond a limit: the server's admission control."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from penstock.errors import Overloaded

WAITING_PER_ROW = 16  # default limit of waiting requests for each row of a step: --max-waiting


class InFlight:
    """Counts `what` is in flight; `advice` completes the refusal of what exceeds the limit."""

    def __init__(self, what: str, limit: Callable[[], float], advice: str = "") -> None:
        self.count = 0
        self.unread = 0  # those that are computed and wait for their clients to read
        self._what = what
        self._limit = limit
        self._advice = advice

    def full(self, count: int = 1) -> bool:
        """Returns whether `count` more exceed the limit. Answers that wait for their clients do not count: clients that
        do not read hold nobody up."""
        return self.count - self.unread + count > self._limit()

    def take(self, count: int = 1) -> None:
        """Counts more in flight, or raises Overloaded and counts nothing."""
        self.check(count)
        self.count += count

    def check(self, count: int = 1) -> None:
        """Raises Overloaded if `count` more exceed the limit."""
        if self.full(count):
            counted = self.count - self.unread
            busy = f"{counted} {self._what} in flight" if counted else f"{count} {self._what} at once"
            raise Overloaded(f"Server is busy: {busy} (the limit is {self._limit():g}). Retry after 1 s{self._advice}.")

    def release(self, count: int = 1) -> None:
        self.count -= count


def owner_limit(owner: str | None, limit: int, others: int) -> int:
    """Returns an owner's part of a limit that all owners share, while the others use `others` of it: half of the rest,
    so that nobody takes everything. Without owners (None) it is the whole limit."""
    return limit if owner is None else (limit - others + 1) // 2


class OwnerPlaces:
    """Counts `what` is in flight for each owner, within one limit for all. See `owner_limit`."""

    def __init__(self, what: str, limit: Callable[[], int], advice: str = "") -> None:
        self._what, self._limit, self._advice = what, limit, advice
        self._of: dict[str | None, InFlight] = {}

    def take(self, owner: str | None) -> None:
        """Counts one more of an owner, or raises Overloaded and counts nothing."""
        if owner not in self._of:
            self._of[owner] = InFlight(self._what, lambda: self._limit_of(owner), self._advice)
        self._of[owner].take()

    def release(self, owner: str | None) -> None:
        self._of[owner].release()
        if not self._of[owner].count:
            del self._of[owner]

    def _limit_of(self, owner: str | None) -> int:
        others = sum(places.count for name, places in self._of.items() if name != owner)
        return owner_limit(owner, self._limit(), others)


class Admission:
    """Holds one request's places. The request takes one when it is admitted. Its first answer uses that place; every
    further answer at the same time takes its own. An answer that outlives its request keeps its place. A request that
    outlives its answer only waits for its client to read it."""

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self._open = False
        self._unread = False  # the request's own place only waits for its client
        self._answers = 0

    def open(self) -> None:
        """Takes the request's place; raises Overloaded if there is none."""
        self._in_flight.take()
        self._open = True

    def close(self) -> None:
        """Gives the request's place back, unless an answer still uses it. Without `open` it does nothing."""
        self._wait_for_client(False)
        if self._open and not self._answers:
            self._in_flight.release()
        self._open = False

    @contextmanager
    def answer(self) -> Iterator[Callable[[], None]]:
        """Holds a place for one answer, and yields a function to call when the answer is computed; raises Overloaded
        if there is no place."""
        if self._answers or not self._open:
            self._in_flight.take()
        self._wait_for_client(False)
        self._answers += 1
        computed = left = False

        def note() -> None:
            nonlocal computed
            computed = True
            self._in_flight.unread += 1

        try:
            yield note
            left = True  # whole, perhaps by a stop string: then nobody notes that it is computed
        finally:
            self._in_flight.unread -= computed
            self._answers -= 1
            if self._answers or not self._open:
                self._in_flight.release()
            else:
                self._wait_for_client(computed or left)

    def _wait_for_client(self, waits: bool) -> None:
        self._in_flight.unread += waits - self._unread
        self._unread = waits


def requests_in_flight(rows_of: Callable[[], int], max_waiting: int | None) -> InFlight:
    """Returns the counter of requests and their answers. It admits as many as `rows_of` computes at once, and
    `max_waiting` more. Without rows, as no engine runs, there is no limit."""

    def limit() -> float:
        rows = rows_of()
        if not rows:
            return inf
        return rows + (WAITING_PER_ROW * rows if max_waiting is None else max_waiting)

    return InFlight("requests", limit, ", or raise --max-waiting")
