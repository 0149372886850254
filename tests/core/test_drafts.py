"""Drafts take blocks that nobody else needs, and none that are not there; rows wait for each other's drafts."""

from __future__ import annotations

from collections.abc import Sequence as Line

from penstock.core import Scheduler, Sequence, check
from penstock.core.drafts import DraftRoom
from penstock.types import RowResult, StepPlan, StepResult
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
    answer(scheduler, plan)
    assert [len(seq.tokens) for seq in scheduler.running] == [5 + 20, 5 + 1]


def answer(scheduler: Scheduler, plan: StepPlan) -> None:
    """Commits a step whose drafts were all right."""
    answers = tuple(RowResult((7,) * row.sample, accepted=len(row.draft)) for row in plan.rows)
    scheduler.commit(plan, StepResult(plan.step, answers))
    check(scheduler)


def answering(count: int) -> Scheduler:
    """Returns a scheduler with sequences that have begun to answer."""
    scheduler = Scheduler(limits(max_len=60, step_tokens=64, num_blocks=100, max_rows=8), drafts=Nothing())
    for id in range(count):
        scheduler.add(Sequence(id, (id, 2, 3, 4), 50))
    step(scheduler)
    return scheduler


class Nothing:
    """Drafts nothing."""

    def propose(self, asked: Line[DraftRoom], rows: int, tokens: int, budget: int) -> list[tuple[int, ...]]:
        return [()] * len(asked)


def test_rows_that_wait_for_drafts_and_others_meet_in_one_step() -> None:
    """Two of four wait for their drafts: the others, which could go on, wait with them."""
    scheduler = answering(4)
    first = scheduler.plan()
    assert len(first.rows) == 4
    for seq in scheduler.running[:2]:
        seq.awaits_drafts = True
    assert scheduler.plan().rows == ()
    answer(scheduler, first)
    assert len(scheduler.plan().rows) == 4


def test_rows_go_on_while_fewer_of_them_wait_for_drafts() -> None:
    scheduler = answering(4)
    first = scheduler.plan()
    scheduler.running[0].awaits_drafts = True
    second = scheduler.plan()
    assert [row.seq for row in second.rows] == [1, 2, 3]
    answer(scheduler, first)
    answer(scheduler, second)


def test_prompts_go_on_while_answers_wait_for_drafts() -> None:
    scheduler = answering(2)
    first = scheduler.plan()
    for seq in scheduler.running:
        seq.awaits_drafts = True
    scheduler.add(Sequence(9, (1, 2, 3), 5))
    second = scheduler.plan()
    assert [(row.seq, row.count) for row in second.rows] == [(9, 3)]
    answer(scheduler, first)
    answer(scheduler, second)
