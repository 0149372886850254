"""Who goes first, how much of a step one row may take, who may come in. Pure functions: fairness, deadlines and
service classes belong here and nowhere else."""

from __future__ import annotations

from penstock.core.sequence import Sequence
from penstock.types import Limits, prefill_budget

Order = tuple[int, int]


def order(seq: Sequence) -> Order:
    """Sequences run, wait and keep their memory in this order; the last is the first victim."""
    return (seq.priority, seq.arrival)


def step_tokens(limits: Limits, running: int, answering: int) -> int:
    """How many tokens a step may have. Every token of a prompt delays the rows that answer in the same step, so while
    there are any, prompts take smaller steps; the more rows there are, the more one step yields and the longer it may
    take."""
    if not answering or not limits.prefill_budget:
        return limits.step_tokens
    return min(max(prefill_budget(limits.prefill_budget, answering), running), limits.step_tokens)


def share(wanted: int, budget: int, behind: int) -> int:
    """How many of the step's tokens a row gets: a long prompt leaves one for every running row behind it, so that
    nobody's stream stands still."""
    return min(wanted, budget - behind)


def starts(limits: Limits, wanted: int, budget: int) -> bool:
    """Whether what is left of a step is enough for a sequence that has so much to compute. Where attention is not
    causal, that is all of it or nothing."""
    return budget >= (wanted if limits.encoder else 1)


def save_positions(seq: Sequence, block_size: int, spacing: int, places: int, asked: tuple[int, ...]) -> list[int]:
    """Where the state of a sequence that starts is saved: where that was `asked` for, after the last block that one
    with the same prompt could use, and now and then in between, less often where that would take most places."""
    last = (len(seq.tokens) - 1) // block_size * block_size
    while last - seq.planned > spacing * max(places // 4, 1):
        spacing *= 2
    between = range((seq.planned // spacing + 1) * spacing, last, spacing)
    return sorted({at for at in (*asked, *between, last) if at > seq.planned})


def up_to_saves(seq: Sequence, count: int) -> int:
    """A row saves its state once: one that would twice ends at the first."""
    ahead = [at - seq.planned for at in seq.saving if 0 < at - seq.planned <= count]
    return ahead[0] if len(ahead) > 1 else count


def save_position(seq: Sequence, start: int, rolling: int) -> int:
    """Where a row from `start` up to what is planned saves its state, 0 if it does not: as its sequence intended and,
    in an answer, every `rolling` positions."""
    intended = next((at for at in seq.saving if start < at <= seq.planned), 0)
    rolled = seq.planned // rolling * rolling
    return intended or (rolled if rolled > start >= seq.prompt_len else 0)


def admits(available: int, needed: int, owed: int, running: int) -> bool:
    """Whether a sequence that needs `needed` blocks for what it already has to say may come in. `owed` blocks are
    still to be taken for what the running ones have to say, and each of them should find one more to grow into."""
    return running == 0 or available >= needed + owed + running + 1
