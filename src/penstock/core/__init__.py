"""The scheduler's world: sequences, blocks and steps. No arrays, no clock, no I/O; the standard library only."""

from penstock.core.check import check
from penstock.core.scheduler import Scheduler
from penstock.core.sequence import Sequence

__all__ = ["Scheduler", "Sequence", "check"]
