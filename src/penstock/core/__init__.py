"""Schedules sequences, blocks and steps, with no arrays, no clock and no I/O. It imports the standard library only."""

from penstock.core.check import check
from penstock.core.policy import Policy, StandardPolicy
from penstock.core.scheduler import Scheduler
from penstock.core.sequence import Sequence, SequenceParams

__all__ = ["Policy", "Scheduler", "Sequence", "SequenceParams", "StandardPolicy", "check"]
