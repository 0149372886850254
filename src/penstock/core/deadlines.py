"""Ends sequences whose deadline passes before they have begun: nobody waits for them any longer."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop
from typing import Protocol

from penstock.core.sequence import Sequence
from penstock.core.tenants import Tenants
from penstock.errors import WaitTooLong
from penstock.types import Event, Failed


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
