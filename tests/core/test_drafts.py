"""Drafts take blocks that nobody else needs, and none that are not there; rows wait for each other's drafts."""

from __future__ import annotations

from collections.abc import Sequence as Line
from copy import deepcopy

import pytest

from penstock.core import Scheduler, Sequence, SequenceParams, check
from penstock.core.drafting.rows import DraftRoom, Drafts
from penstock.types import Event, Finished, RowResult, StepPlan, StepResult
from tests.core.world import limits, step


class Together:
    """Has rows with drafts meet in one step."""

    def halves(self, rows: int) -> bool:
        return False


class Greedy(Together):
    """Drafts as much as every sequence has room for."""

    def propose(self, asked: Line[DraftRoom], rows: int, tokens: int, budget: int) -> list[tuple[int, ...]]:
        return [(7,) * room.most for room in asked]


class Nothing(Together):
    """Drafts nothing."""

    def propose(self, asked: Line[DraftRoom], rows: int, tokens: int, budget: int) -> list[tuple[int, ...]]:
        return [()] * len(asked)


class ByTurns(Nothing):
    """Has rows with drafts computed in two steps by turns, if there are several."""

    def halves(self, rows: int) -> bool:
        return rows > 1


@pytest.mark.usefixtures("overcommitted")
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


def answering(count: int, drafts: Drafts | None = None) -> Scheduler:
    """Returns a scheduler with sequences that have begun to answer."""
    scheduler = Scheduler(limits(max_len=60, step_tokens=64, num_blocks=100, max_rows=8), drafts=drafts or Nothing())
    for id in range(count):
        scheduler.add(Sequence(id, (id, 2, 3, 4), 50))
    step(scheduler)
    return scheduler


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


def test_half_of_the_rows_with_drafts_are_computed_while_the_others_are_verified() -> None:
    scheduler = answering(5, ByTurns())
    for seq in scheduler.running:
        seq.awaits_drafts = True
    first, second = scheduler.plan(), scheduler.plan()
    assert [row.seq for row in first.rows] == [0, 1, 2]
    assert [row.seq for row in second.rows] == [3, 4]
    assert scheduler.plan().rows == ()
    answer(scheduler, first)
    third = scheduler.plan()
    assert [row.seq for row in third.rows] == [0, 1, 2]
    scheduler.running[4].awaits_drafts = False  # it goes on at once
    answer(scheduler, second)
    assert [row.seq for row in scheduler.plan().rows] == [3, 4]
    answer(scheduler, third)


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


class Exact(Together):
    """Drafts nine tokens."""

    def propose(self, asked: Line[DraftRoom], rows: int, tokens: int, budget: int) -> list[tuple[int, ...]]:
        return [(7,) * min(room.most, 9) for room in asked]


CUT_BY = {
    "a loop": (Sequence(1, (1, 2, 3, 4), 1400, SequenceParams(guarded_from=0)), "length"),
    "a stop token": (Sequence(1, (1, 2, 3, 4), 1400, SequenceParams(stop_ids=frozenset({9}))), "stop"),
}


@pytest.mark.parametrize("states", [0, 8])
@pytest.mark.parametrize("cut_by", CUT_BY)
def test_accepted_tokens_that_are_cut_were_never_computed(cut_by: str, states: int) -> None:
    """Its last row has computed more positions than the answer keeps tokens: the last block is not full."""
    seq, reason = deepcopy(CUT_BY[cut_by])
    scheduler = Scheduler(
        limits(max_len=1500, step_tokens=64, num_blocks=400, max_rows=8, block_size=8, states=states), drafts=Exact()
    )
    scheduler.add(seq)
    ended: list[Event] = []
    cut = 0
    while scheduler.sequences:
        plan = scheduler.plan()
        (row,) = plan.rows
        stops = "stop" in cut_by and len(seq.tokens) > 1000 and len(row.draft) > 3
        tokens = (7, 7, 7, 9, 7, 7, 7, 7, 7, 7, 7)[: row.sample] if stops else (7,) * row.sample
        before = len(seq.tokens)
        ended = scheduler.commit(plan, StepResult(plan.step, (RowResult(tokens, accepted=len(row.draft)),)))
        cut = before + len(tokens) - len(seq.tokens)
        check(scheduler)
    assert [event.reason for event in ended if isinstance(event, Finished)] == [reason]
    assert cut > 2, "the last row's draft was not cut: this proves nothing"
