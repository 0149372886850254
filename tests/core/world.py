"""Steps a scheduler against made-up answers, one step at a time."""

from __future__ import annotations

from penstock.core import Scheduler, Sequence, check
from penstock.types import Event, Limits, RowResult, StepPlan, StepResult, TokenLogprob


def limits(
    *,
    max_len: int = 64,
    max_rows: int = 4,
    step_tokens: int = 16,
    block_size: int = 4,
    num_blocks: int = 16,
    encoder: bool = False,
    states: int = 0,
    windows: tuple[int, ...] = (0,),
    host_places: int = 0,
    host_states: int = 0,
) -> Limits:
    """Returns limits that are small in everything."""
    return Limits(
        max_len,
        max_rows,
        step_tokens,
        block_size,
        num_blocks,
        vocab=100,
        encoder=encoder,
        states=states,
        windows=windows,
        host_places=host_places,
        host_states=host_states,
    )


def answer(scheduler: Scheduler, plan: StepPlan, token: int = 50) -> list[Event]:
    """Commits a plan: every sampled row gets `token`, every scored position a score of 0."""
    rows = []
    for row in plan.rows:
        seq = scheduler.sequences.get(row.seq)
        end = row.start + row.count
        known = seq.tokens[end - row.sample + 1 : end + 1] if seq else []
        rows.append(
            RowResult(
                tokens=(token,) if row.sample > len(known) else (),
                scores=tuple(TokenLogprob(known_token, 0.0) for known_token in known),
            )
        )
    events = scheduler.commit(plan, StepResult(plan.step, tuple(rows)))
    check(scheduler)
    return events


def step(scheduler: Scheduler, token: int = 50) -> tuple[StepPlan, list[Event]]:
    """Plans and commits one step; returns the plan and its events."""
    plan = scheduler.plan()
    check(scheduler)
    return plan, answer(scheduler, plan, token)


def run(scheduler: Scheduler, *sequences: Sequence) -> list[Event]:
    """Adds the sequences and steps until nothing is left."""
    for seq in sequences:
        scheduler.add(seq)
    events: list[Event] = []
    while scheduler.sequences:
        events += step(scheduler)[1]
    return events


def counts(plan: StepPlan) -> dict[int, int]:
    """Returns how many positions each sequence computes."""
    return {row.seq: row.count for row in plan.rows}
