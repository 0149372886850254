"""Ends sequences that cannot meet their deadline, or have not begun by then, and moves those that miss a target behind
those that can meet theirs.

Everything here is pure: times come in as arguments.
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

LOOKED_AT = 8  # sequences of each tenant's line that stay in their place: hardly more start in one step


class SequenceQueue(Protocol):
    """Is where sequences wait: in an engine's scheduler, or at the gateway of a fleet."""

    @property
    def now(self) -> float: ...

    @property
    def tenants(self) -> Tenants: ...

    @property
    def sequences(self) -> Mapping[int, Sequence]: ...

    def abort(self, id: int) -> object: ...


def expire(queue: SequenceQueue) -> list[Event]:
    """Ends sequences that have never run, in any engine, and whose deadline has passed; returns their failures."""
    deadlines, failed = queue.tenants.deadlines, list[Event]()
    while deadlines and deadlines[0][0] <= queue.now:
        _, id = heappop(deadlines)
        seq = queue.sequences.get(id)
        if seq is not None and not seq.begun:
            queue.abort(id)
            message = (
                f"the deadline passed after {seq.params.claim.deadline:.3g} s in line, before the answer was begun"
            )
            failed.append(Failed(id, WaitTooLong.code, f"{message}: retry later, or allow more time"))
    return failed


def refuse_hopeless(scheduler: Scheduler, costs: CostModel) -> list[Event]:
    """Ends sequences that have never run and would miss their deadline even if they started now, with no others;
    returns their failures. Sequences that only miss a target move behind the ones in their line that can meet
    theirs."""
    failed = list[Event]()
    for tenant in scheduler.tenants.in_line() if costs.known else ():
        in_place = 0
        for seq in list(tenant.line):
            to_deadline = _to_deadline(seq, scheduler.now)
            left = min(seq.standing.due - scheduler.now, to_deadline)
            fresh = left < inf and len(seq.tokens) == seq.prompt_len  # requests begun in another engine continue
            seconds = _seconds_alone(seq, left, scheduler, costs) if fresh else left
            if seconds > to_deadline and not seq.begun:
                failed.append(_refused(seq, seconds, max(to_deadline, 0.0)))
                scheduler.abort(seq.id)
            elif seconds > left and seq.standing.due < inf:
                scheduler.tenants.postpone(seq)
            elif (in_place := in_place + 1) == LOOKED_AT:
                break
    return failed


def _to_deadline(seq: Sequence, now: float) -> float:
    return inf if seq.params.claim.deadline is None else seq.times.arrived + seq.params.claim.deadline - now


def _seconds_alone(seq: Sequence, left: float, scheduler: Scheduler, costs: CostModel) -> float:
    """Returns how long a sequence's prompt takes in a step of its own. Cached tokens take no time; they are looked up
    only if the prompt would take longer than is `left`."""
    seconds = costs.prompt_seconds(seq.end)
    if seconds <= left:
        return seconds
    cached = scheduler.cache.prefixes.held(seq)
    return costs.prompt_seconds(seq.end - cached, cached)


def _refused(seq: Sequence, seconds: float, left: float) -> Failed:
    needed = f"the prompt takes about {seconds:.3g} s to compute"
    message = f"{needed}, and {left:.3g} s are left of its deadline of {seq.params.claim.deadline:.3g} s"
    advice = "allow more time, send a shorter prompt, or retry later"
    return Failed(seq.id, WaitTooLong.code, f"{message}: {advice}", retry_after=seconds - left)
