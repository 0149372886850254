"""Lets sequences whose first token cannot come in time go after those whose can, and ends those whose deadline passes
before they have begun: nobody waits for them any longer.

Everything here is pure: it has no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop
from math import inf
from typing import Protocol

from penstock.core.scheduler import Scheduler
from penstock.core.sequence import Sequence
from penstock.core.step_cost import CostModel
from penstock.core.tenants import Tenants
from penstock.errors import WaitTooLong
from penstock.types import Event, Failed

LOOKED_AT = 64  # sequences of each tenant's line before a step: hardly more start in one


class SequenceQueue(Protocol):
    """Is where sequences wait: in an engine's scheduler, or at the gateway of a fleet."""

    @property
    def now(self) -> float:
        """Returns the present time."""

    @property
    def tenants(self) -> Tenants:
        """Returns who waits."""

    @property
    def sequences(self) -> Mapping[int, Sequence]:
        """Returns all that have not ended, by id."""

    def abort(self, id: int) -> object:
        """Ends a sequence."""


def expire(queue: SequenceQueue) -> list[Event]:
    """Ends the sequences that have never run and whose deadline is past; returns their failures. What has begun goes
    on."""
    deadlines, failed = queue.tenants.deadlines, list[Event]()
    while deadlines and deadlines[0][0] <= queue.now:
        _, id = heappop(deadlines)
        seq = queue.sequences.get(id)
        if seq is not None and seq.times.admitted is None:
            queue.abort(id)
            message = f"the deadline passed after {seq.claim.deadline:.3g} s in line, before the answer was begun"
            failed.append(Failed(id, WaitTooLong.code, f"{message}: retry later, or allow more time"))
    return failed


def postpone_hopeless(scheduler: Scheduler, costs: CostModel) -> None:
    """Puts waiting sequences that cannot have their first token by the time it is wanted, even if they start now and
    alone, behind those of their line that can. What is cached of a prompt takes no time."""
    if not costs.known:
        return
    for tenant in scheduler.tenants.in_line():
        for seq in tenant.line[:LOOKED_AT]:
            if seq.due < inf and seq.times.answered is None and _is_hopeless(seq, scheduler, costs):
                scheduler.tenants.postpone(seq)


def _is_hopeless(seq: Sequence, scheduler: Scheduler, costs: CostModel) -> bool:
    left = seq.due - scheduler.now
    if costs.prompt_seconds(seq.end) <= left:
        return False
    cached = scheduler.cache.held(seq)
    return costs.prompt_seconds(seq.end - cached, cached) > left
