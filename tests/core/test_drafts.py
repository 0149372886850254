"""Drafts take blocks that nobody else needs, and none that are not there."""

from __future__ import annotations

from collections.abc import Sequence as Line

from penstock.core import Scheduler, Sequence, check
from penstock.core.drafts import DraftRoom
from penstock.types import RowResult, StepResult
from tests.core.world import limits, step


class Greedy:
    """Drafts as much as every sequence has room for."""

    def propose(self, asked: Line[DraftRoom], rows: int, tokens: int, budget: int) -> list[tuple[int, ...]]:
        return [(7,) * room.most for room in asked]


def test_a_draft_for_which_others_have_left_no_blocks_is_not_verified() -> None:
    scheduler = Scheduler(limits(max_len=40, step_tokens=64, num_blocks=10), drafts=Greedy())
    for id in (1, 2):
        scheduler.add(Sequence(id, (id, 2, 3, 4), 36))
    step(scheduler)
    plan = scheduler.plan()
    check(scheduler)
    assert [len(row.draft) for row in plan.rows] == [19, 0]
    answers = tuple(RowResult((7,) * row.sample, accepted=len(row.draft)) for row in plan.rows)
    scheduler.commit(plan, StepResult(plan.step, answers))
    check(scheduler)
    assert [len(seq.tokens) for seq in scheduler.running] == [5 + 20, 5 + 1]


def test_a_sequence_waits_for_its_draft_while_an_earlier_chunk_of_it_is_committed() -> None:
    scheduler = Scheduler(limits(step_tokens=8), drafts=Greedy())
    scheduler.add(Sequence(1, (1, 2, 3), 30, generated=(4, 5, 6, 7, 8, 9)))
    chunk, drafted = scheduler.plan(), scheduler.plan()
    assert [row.draft for row in chunk.rows] == [()]
    assert [bool(row.draft) for row in drafted.rows] == [True]
    scheduler.commit(chunk, StepResult(chunk.step, (RowResult(),)))
    assert not scheduler.plan().rows
    scheduler.commit(drafted, StepResult(drafted.step, (RowResult((7, 8), accepted=1),)))
    check(scheduler)
    assert scheduler.sequences[1].tokens[-4:] == [8, 9, 7, 8]
