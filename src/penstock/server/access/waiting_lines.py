"""Adds up the work ahead of a request: prompts without a first token, in the order in which the engine's policy begins
them.

Everything here is pure: times come in as arguments.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import inf
from typing import NamedTuple

from penstock.types import Request


class Work(NamedTuple):
    """Is what an engine has to do until requests have their first tokens."""

    tokens: float = 0.0  # prompt tokens to compute
    pairs: float = 0.0  # pairs of such a token and an earlier one, for attention
    requests: int = 0

    def plus(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.pairs + other.pairs, self.requests + other.requests)

    def minus(self, other: Work) -> Work:
        return Work(self.tokens - other.tokens, self.pairs - other.pairs, self.requests - other.requests)


class Place(NamedTuple):
    """Sorts the waiting requests of one tenant and priority: the earlier due goes first, then the lower rank."""

    due: float  # when its first token is wanted; infinite: no time is stated, or none that can be kept
    rank: float
    id: int  # the request's


class Ahead(NamedTuple):
    """Describes the work ahead of a request."""

    first: Work  # requests with a better priority
    mine: Work  # its tenant's requests with the same priority
    others: Work  # other tenants' requests with the same priority
    share: float  # its tenant's share of the engine among those others


class WaitingLine:
    """Holds the waiting requests of one tenant and priority, those that go first at the beginning."""

    def __init__(self) -> None:
        self.weight = 1.0
        self._places: list[Place] = []
        self._tokens: list[float] = []  # sums over a part of a list are fast
        self._pairs: list[float] = []
        self._sent: dict[int, dict[Place, tuple[Work, object]]] = {}  # keys identify senders, which stay alive

    def __len__(self) -> int:
        return len(self._places)

    def add(self, sender: object, place: Place, work: Work) -> None:
        at = bisect_left(self._places, place)
        self._places.insert(at, place)
        self._tokens.insert(at, work.tokens)
        self._pairs.insert(at, work.pairs)
        self._sent.setdefault(id(sender), {})[place] = work, sender

    def remove(self, sender: object, place: Place) -> None:
        at, sent = bisect_left(self._places, place), self._sent[id(sender)]
        del self._places[at], self._tokens[at], self._pairs[at], sent[place]
        if not sent:
            del self._sent[id(sender)]

    def work(self) -> Work:
        return Work(sum(self._tokens), sum(self._pairs), len(self._places))

    def ahead(self, sender: object, place: Place, now: float) -> Work:
        earliest = _earliest(place, now)
        begin = bisect_left(self._places, (earliest,))
        end = max(bisect_right(self._places, place), begin)
        ahead = Work(sum(self._tokens[begin:end]), sum(self._pairs[begin:end]), end - begin)
        for other, (work, _) in self._sent.get(id(sender), {}).items():
            if earliest <= other.due and other <= place:
                ahead = ahead.minus(work)
        return ahead


class WaitingLines:
    """Holds the lines of all tenants and priorities."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, str], WaitingLine] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def join(self, request: Request, sender: object, place: Place, work: Work) -> None:
        line = self._lines.setdefault(_line_of(request), WaitingLine())
        line.weight = request.claim.weight
        line.add(sender, place, work)

    def leave(self, request: Request, sender: object, place: Place) -> None:
        line = self._lines[_line_of(request)]
        line.remove(sender, place)
        if not line:
            del self._lines[_line_of(request)]

    def ahead(self, request: Request, sender: object, place: Place, now: float) -> Ahead:
        """Returns the work ahead of a request, except for its own sender's."""
        first = mine = others = Work()
        weight = others_weight = request.claim.weight
        for (priority, tenant), line in self._lines.items():
            if priority < request.priority:
                first = first.plus(line.work())
            elif priority == request.priority and tenant != request.claim.tenant:
                others, others_weight = others.plus(line.work()), others_weight + line.weight
            elif priority == request.priority:
                mine = line.ahead(sender, place, now)
        return Ahead(first, mine, others, weight / others_weight)


def _earliest(place: Place, now: float) -> float:
    """Returns the earliest due time ahead of a place. Overdue requests let those pass that can be in time."""
    return now if place.due < inf else 0.0


def _line_of(request: Request) -> tuple[int, str]:
    return request.priority, request.claim.tenant
