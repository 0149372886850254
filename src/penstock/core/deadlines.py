"""Ends sequences whose deadline passes before they have begun: nobody waits for them any longer."""

from __future__ import annotations

from heapq import heappop

from penstock.core.scheduler import Scheduler
from penstock.errors import WaitTooLong
from penstock.types import Event, Failed


def expire(scheduler: Scheduler) -> list[Event]:
    """Ends the sequences that have never run and whose deadline is past; returns their failures. What has begun goes
    on."""
    deadlines, failed = scheduler.tenants.deadlines, list[Event]()
    while deadlines and deadlines[0][0] <= scheduler.now:
        _, id = heappop(deadlines)
        seq = scheduler.sequences.get(id)
        if seq is not None and seq.times.admitted is None:
            scheduler.abort(id)
            message = f"the deadline passed after {seq.claim.deadline:.3g} s in line, before the answer was begun"
            failed.append(Failed(id, WaitTooLong.code, f"{message}: retry later, or allow more time"))
    return failed
