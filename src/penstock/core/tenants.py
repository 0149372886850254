"""Shares the engine among tenants: each has a line of waiting sequences and a counter of the work it has had.

The counters are virtual token counters (VTC): work divided by the tenant's weight. The tenant with the least is served
next. A returning tenant starts at the lowest counter of the waiting tenants, so nobody saves up idle time. Work counts
computed prompt tokens and twice the generated tokens; cached tokens, and tokens computed again after a preemption, are
free.

Everything here is pure: it reads no clock.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heappush
from math import inf
from typing import Any

from penstock.core.policy import ServingLoad
from penstock.core.sequence import Sequence

PER_GENERATED = 2  # times the work of a prompt token that a generated one counts
MOST_IDLE = 4096  # tenants without sequences whose counters are remembered


class Tenant:
    """Holds one tenant's line, in the policy's order, and its counter."""

    __slots__ = ("counter", "line", "name", "running", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.counter = 0.0  # work divided by the weight
        self.weight = 1.0
        self.line: list[Sequence] = []
        self.running = 0  # sequences

    def charge(self, work: float) -> None:
        self.counter += work / self.weight


class Tenants:
    """Knows all tenants that have sequences, and the counters of those that had some lately. `order` is what the
    sequences of a line are sorted by."""

    def __init__(self, order: Callable[[Sequence], Any]) -> None:
        self.waiting = 0  # sequences in all lines
        self.deadlines: list[tuple[float, int]] = []  # a heap: when they are, and of which sequence
        self.foreground = 0  # sequences that are not in the background, running and waiting
        self.reach = 0  # positions of all running sequences at their maximum lengths
        self.prefilling: dict[int, None] = {}  # ids of running sequences that have no token yet
        self._running_background = 0
        self._order = order
        self._active: dict[str, Tenant] = {}
        self._idle: OrderedDict[str, Tenant] = OrderedDict()
        self._last: Tenant | None = None  # whose line became empty last

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, name: str) -> bool:
        return name in self._active

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._active.values())

    def load(self, running: int) -> ServingLoad:
        return ServingLoad(running, self._running_background, self.foreground)

    def in_line(self) -> list[Tenant]:
        return [tenant for tenant in self._active.values() if tenant.line]

    def next(self, turn: Callable[[Sequence], Any]) -> Sequence | None:
        return min((tenant.line[0] for tenant in self.in_line()), key=turn, default=None)

    def add(self, seq: Sequence) -> None:
        """Puts a sequence that has arrived in its tenant's line. If that was empty, the tenant's counter is lifted to
        the lowest counter of waiting tenants, or to the counter of the tenant that waited last."""
        tenant = self._find(seq.params.claim.tenant)
        if not tenant.line:
            others = [other.counter for other in self._active.values() if other.line]
            last = self._last.counter if self._last is not None else 0.0
            tenant.counter = max(tenant.counter, min(others, default=last))
        if seq.params.claim.deadline is not None:
            heappush(self.deadlines, (seq.times.arrived + seq.params.claim.deadline, seq.id))
        tenant.weight = seq.params.claim.weight
        seq.standing.tenant = tenant
        self.foreground += not seq.params.background
        self.wait(seq)

    def wait(self, seq: Sequence) -> None:
        insort(seq.standing.tenant.line, seq, key=self._order)
        self.waiting += 1

    def take(self, seq: Sequence) -> None:
        tenant = seq.standing.tenant
        tenant.line.remove(seq)
        self.waiting -= 1
        if not tenant.line:
            self._last = tenant

    def postpone(self, seq: Sequence) -> None:
        self.take(seq)
        seq.standing.due = inf
        self.wait(seq)

    def start(self, seq: Sequence) -> None:
        self.take(seq)
        seq.standing.tenant.running += 1
        self.reach += seq.max_len
        self._running_background += seq.params.background
        if seq.times.answered is None:
            self.prefilling[seq.id] = None

    def answer(self, seq: Sequence, now: float) -> None:
        seq.times.answered = now
        self.prefilling.pop(seq.id, None)

    def stop(self, seq: Sequence) -> None:
        seq.standing.tenant.running -= 1
        self.reach -= seq.max_len
        self._running_background -= seq.params.background
        self.prefilling.pop(seq.id, None)

    def end(self, seq: Sequence) -> None:
        """Forgets a sequence that has ended and is in no line any more. The counters of tenants without sequences are
        kept for those that had some last."""
        tenant = seq.standing.tenant
        self.foreground -= not seq.params.background
        if tenant.line or tenant.running:
            return
        del self._active[tenant.name]
        self._idle[tenant.name] = tenant
        if len(self._idle) > MOST_IDLE:
            self._idle.popitem(last=False)

    def _find(self, name: str) -> Tenant:
        found = self._active.get(name)
        if found is None:
            found = self._idle.pop(name) if name in self._idle else Tenant(name)
            self._active[name] = found
        return found


class Turns:
    """Yields prompts for the rest of a step, begun and waiting ones, the least by `turn` first. The key may grow from
    one turn to the next. A waiting sequence that is passed over stays in its line, but gets only one turn per step."""

    def __init__(self, begun: list[Sequence], tenants: list[Tenant], turn: Callable[[Sequence], Any]) -> None:
        self._begun = begun
        self._heads = dict.fromkeys(tenants, 0)  # the place in its line of each tenant's next sequence
        self._turn = turn
        self._last: Sequence | None = None

    def __iter__(self) -> Iterator[Sequence]:
        while found := [*self._begun, *self._next_in_line()]:
            seq = min(found, key=self._turn) if len(found) > 1 else found[0]
            if seq in self._begun:
                self._begun.remove(seq)
                if seq.waits:  # it was preempted for one that had its turn before
                    continue
            else:
                self._last = seq
            yield seq

    def close(self) -> None:
        self._heads = {}

    def _next_in_line(self) -> Iterator[Sequence]:
        if self._last is not None:
            tenant, last, self._last = self._last.standing.tenant, self._last, None
            if tenant in self._heads and last.waits:
                self._heads[tenant] += 1
        for tenant, at in self._heads.items():
            if at < len(tenant.line):
                yield tenant.line[at]
