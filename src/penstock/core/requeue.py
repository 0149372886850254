"""Takes a plan back whose step could not be computed."""

from __future__ import annotations

from penstock.core.scheduler import Scheduler
from penstock.types import StepPlan


def requeue(scheduler: Scheduler, plan: StepPlan) -> None:
    """Takes back the plan made last: its sequences wait to be computed again."""
    scheduler.cache.states.give_back(*plan.rows)
    for row in plan.rows:
        seq = scheduler.sequences[row.seq]
        if row.sample and seq.end > len(seq.tokens):
            seq.end -= 1  # the token that this row would have sampled
        scheduler.preempt(seq)
