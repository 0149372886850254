"""Who goes first, how much of a step one row may take, who may come in. Pure functions: fairness, deadlines and
service classes belong here and nowhere else."""

from __future__ import annotations

from penstock.core.sequence import Sequence
from penstock.types import Limits, mixed_tokens

Order = tuple[int, int]


def order(seq: Sequence) -> Order:
    """Sequences run, wait and keep their memory in this order; the last is the first victim."""
    return (seq.priority, seq.arrival)


def step_tokens(limits: Limits, running: int, answering: int) -> int:
    """How many tokens a step may have. Every token of a prompt delays the rows that answer in the same step, so while
    there are any, prompts take smaller steps; the more rows there are, the more one step yields and the longer it may
    take."""
    if not answering or not limits.mixed_tokens:
        return limits.max_tokens
    return min(max(mixed_tokens(limits.mixed_tokens, answering), running), limits.max_tokens)


def share(wanted: int, budget: int, behind: int) -> int:
    """How many of the step's tokens a row gets: a long prompt leaves one for every running row behind it, so that
    nobody's stream stands still."""
    return min(wanted, budget - behind)


def starts(limits: Limits, wanted: int, budget: int) -> bool:
    """Whether what is left of a step is enough for a sequence that has so much to compute. Where attention is not
    causal, that is all of it or nothing."""
    return budget >= (wanted if limits.encoder else 1)


def admits(available: int, needed: int, owed: int, running: int) -> bool:
    """Whether a sequence that needs `needed` blocks for what it already has to say may come in. `owed` blocks are
    still to be taken for what the running ones have to say, and each of them should find one more to grow into."""
    return running == 0 or available >= needed + owed + running + 1
