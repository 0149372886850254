"""Tests recurrent states: prefixes are reused where a state was saved, and states are saved where that pays."""

from __future__ import annotations

import pytest

from penstock.core import Scheduler, Sequence, SequenceParams
from penstock.core.block_events import Watchers
from penstock.core.check import check
from penstock.core.host_states import HostStates
from penstock.core.prefix import PrefixNode
from penstock.core.state_saving import StateSaving, save_positions
from penstock.core.states import SavedStates
from penstock.types import Row, StepPlan, Tokens
from tests.core.test_memory_forecast import Greedy
from tests.core.world import answer, counts, limits, run, step

SYSTEM = tuple(range(30))


def scheduler_of(places: int = 8, **others: int) -> Scheduler:
    return Scheduler(limits(num_blocks=64, states=places, **others))


def cached(scheduler: Scheduler, *sequences: Sequence) -> dict[int, int]:
    events = run(scheduler, *sequences)
    return {event.seq: event.cached for event in events if isinstance(event, Tokens)}


def computed(scheduler: Scheduler, *sequences: Sequence) -> int:
    for seq in sequences:
        scheduler.add(seq)
    total = 0
    while scheduler.sequences:
        total += sum(counts(step(scheduler)[0]).values())
    return total


def saves(plan: StepPlan) -> list[int]:
    return [row.at for row in plan.rows if row.save >= 0]


def test_the_next_turn_of_a_conversation_computes_what_follows_the_saved_state() -> None:
    scheduler = scheduler_of()
    first = (*SYSTEM, *range(40, 50))
    assert cached(scheduler, Sequence(1, first, 3)) == {1: 0}
    assert cached(scheduler, Sequence(2, (*first, 50, 50, 50, 7, 8, 9), 1)) == {2: 36}


def test_the_next_turn_finds_most_of_a_long_answer_too() -> None:
    """Its state was saved every sixteen positions, and the latest was kept."""
    scheduler = scheduler_of()
    assert cached(scheduler, Sequence(1, SYSTEM, 26)) == {1: 0}
    assert len(scheduler.cache.states.saved()) == 3  # after 16 and 28 tokens of the prompt, and after 48 of all
    assert cached(scheduler, Sequence(2, (*SYSTEM, *[50] * 26, 7, 8), 1)) == {2: 48}


def test_the_same_prompt_again_begins_at_its_last_block() -> None:
    scheduler = scheduler_of()
    for id, expected in ((1, 0), (2, 28), (3, 28)):
        assert cached(scheduler, Sequence(id, SYSTEM[:29], 1)) == {id: expected}
    assert scheduler.stats().cached_tokens == 56


def test_those_who_come_together_compute_what_they_share_once() -> None:
    scheduler = scheduler_of(step_tokens=64)
    total = computed(scheduler, *(Sequence(id, (*SYSTEM, 50 + id, 60 + id), 0) for id in range(4)))
    assert total == 28 + 4 * 4
    assert scheduler.stats().cached_tokens == 3 * 28


def test_prompts_that_come_later_teach_where_they_part() -> None:
    scheduler = scheduler_of(step_tokens=64)
    for id, expected in ((1, 0), (2, 0), (3, 28), (4, 28)):
        assert cached(scheduler, Sequence(id, (*SYSTEM, *range(50 + id, 60 + id)), 1)) == {id: expected}


def test_one_waits_only_for_a_state_that_will_be_saved() -> None:
    scheduler = scheduler_of(step_tokens=32)
    scheduler.add(Sequence(1, (*SYSTEM, 71, 72, 73, 74, 75, 76), 1))
    first = scheduler.plan()
    scheduler.add(Sequence(2, (*SYSTEM[:20], 81, 82), 1))  # 1 is past the 20 tokens that they share
    second = scheduler.plan()
    assert counts(second) == {1: 4, 2: 22}
    scheduler.add(Sequence(3, (*SYSTEM, 71, 72, 91), 1))  # 1 saves after 32: worth waiting for
    third = scheduler.plan()
    assert 3 not in counts(third)
    for plan in (first, second, third):
        answer(scheduler, plan)
    assert [(row.seq, row.start) for row in scheduler.plan().rows if row.seq == 3] == [(3, 32)]


def test_a_row_saves_once_and_anywhere_in_it() -> None:
    scheduler = scheduler_of(step_tokens=64)
    scheduler.add(Sequence(1, SYSTEM, 1))
    plan = scheduler.plan()
    assert counts(plan) == {1: 30}
    assert saves(plan) == [28]
    answer(scheduler, plan)
    run(scheduler)
    scheduler.add(Sequence(2, (*SYSTEM[:9], *range(50, 90)), 1))
    plans = [step(scheduler)[0] for _ in range(2)]
    assert [counts(plan) for plan in plans] == [{2: 8}, {2: 41}]  # up to where the two part, and the rest
    assert [saves(plan) for plan in plans] == [[8], [48]]


def test_long_prompts_are_saved_now_and_then() -> None:
    seq = Sequence(1, (1,) * 1000, 1)
    assert save_positions(seq, 16, 256, 100, (0, 32)) == [32, 256, 512, 768, 992]
    assert save_positions(seq, 16, 16, 16, (0, 0)) == [256, 512, 768, 992]
    seq.planned = 600
    assert save_positions(seq, 16, 256, 100, (0, 32)) == [768, 992]


def test_the_state_not_used_for_longest_goes_first() -> None:
    scheduler = scheduler_of(places=2, step_tokens=64)
    prompts = [(first, *SYSTEM) for first in (50, 51, 52)]
    for id, prompt in enumerate(prompts[:2]):
        run(scheduler, Sequence(id, prompt, 0))
    assert cached(scheduler, Sequence(3, prompts[0], 1)) == {3: 28}
    run(scheduler, Sequence(4, prompts[2], 0))
    usable = [
        scheduler.cache.prefixes.usable(scheduler.cache.prefixes.match(Sequence(9, prompt, 1))) for prompt in prompts
    ]
    assert [len(nodes) for nodes in usable] == [7, 0, 7]


def test_a_state_goes_with_its_block() -> None:
    scheduler = Scheduler(limits(states=4, step_tokens=64))  # sixteen blocks
    run(scheduler, Sequence(1, SYSTEM, 0))
    assert len(scheduler.cache.states.saved()) == 1
    run(scheduler, Sequence(2, (99,) * 60, 0))
    assert not scheduler.cache.prefixes.match(Sequence(3, SYSTEM, 1))[6:]
    assert len(scheduler.cache.states.saved()) == 1  # of the other


def test_one_that_is_begun_with_is_not_written_in_the_same_step() -> None:
    scheduler = scheduler_of(places=1, step_tokens=64)
    run(scheduler, Sequence(1, SYSTEM, 0))
    scheduler.add(Sequence(2, (*SYSTEM, 1, 2, 3, 4), 1))
    scheduler.add(Sequence(3, (9, *SYSTEM), 1))
    plan = scheduler.plan()
    assert [row.begin for row in plan.rows] == [0, -1]
    assert not saves(plan)
    answer(scheduler, plan)
    run(scheduler)


@pytest.mark.parametrize("how", ["abort", "fail", "requeue"])
def test_what_was_not_written_is_not_kept(how: str) -> None:
    scheduler = scheduler_of(step_tokens=64)
    scheduler.add(Sequence(1, SYSTEM, 5))
    plan = scheduler.plan()
    assert scheduler.cache.states.pending
    if how == "abort":
        scheduler.abort(1)
        answer(scheduler, plan)
    elif how == "fail":
        scheduler.fail(plan, "oops", "it broke")
    else:
        scheduler.requeue(plan)
    check(scheduler)
    assert not scheduler.cache.states.pending
    assert not scheduler.cache.states.saved()
    run(scheduler)


def test_a_preempted_sequence_goes_on_from_its_last_saved_state() -> None:
    few = limits(num_blocks=20, max_len=48, states=8, step_tokens=32)
    scheduler = Scheduler(few, policy=Greedy(few))
    scheduler.add(Sequence(1, SYSTEM[:21], 27))
    scheduler.add(Sequence(2, (9, *SYSTEM[:20]), 27))
    begun = {}
    while scheduler.sequences:
        plan, _ = step(scheduler)
        begun |= {row.seq: row.start for row in plan.rows if row.begin >= 0}
    assert scheduler.stats().preemptions == 1
    assert begun == {2: 32}


def test_a_sequence_without_prefix_cache_saves_nothing() -> None:
    scheduler = scheduler_of()
    run(scheduler, Sequence(1, SYSTEM, 0, prefix_cache=False))
    assert not scheduler.cache.states.saved()


def test_nobody_stops_for_those_who_will_not_use_it() -> None:
    scheduler = scheduler_of(step_tokens=64)
    scheduler.add(Sequence(1, (*SYSTEM, 50), 1))
    scheduler.add(Sequence(2, SYSTEM[:10], 0, prefix_cache=False))
    scheduler.add(Sequence(3, SYSTEM[:10], 1, SequenceParams(score=True)))
    assert counts(scheduler.plan()) == {1: 31, 2: 10, 3: 10}


def test_a_place_that_was_read_and_then_written_before_a_draft_stays_with_the_draft() -> None:
    states = SavedStates(1, HostStates(0, lambda node: True), Watchers())
    saving = StateSaving(states, 4, 16)
    saved = Row(1, 0, 4, 0, save=0, at=4)
    seq = Sequence(1, (1,) * 4, 9)
    seq.blocks.nodes, seq.computed = [PrefixNode(None, (1,) * 4, [0], [0])], 4
    states.take()
    saving.keep(seq, saved)
    states.open_step()
    reading = Row(2, 4, 1, 1, begin=states.read(seq.blocks.nodes[0]))
    states.open_step()
    drafted = saving.with_draft(Row(3, 8, 1, 1), (5,))
    assert drafted.save == reading.begin == 0
    assert saving.settle(Sequence(2, (1,) * 5, 9), reading, 0) == 5
    assert states.pending == {0}
    assert saving.settle(Sequence(3, (1,) * 9, 9), drafted, 1) == 10
    assert states.free() == [0]
