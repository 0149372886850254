"""The invariants can fail: each kind of damage is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.core import Scheduler, Sequence, check
from penstock.core.prefix import Node
from tests.core.world import limits, run, step


@pytest.fixture
def scheduler() -> Scheduler:
    scheduler = Scheduler(limits(states=4))
    run(scheduler, Sequence(1, (1,) * 12, 1))
    for id in (2, 3):
        scheduler.add(Sequence(id, (id,) * 6, 9))
    step(scheduler)
    scheduler.add(Sequence(4, (4,) * 60, 1))
    step(scheduler)
    check(scheduler)
    return scheduler


def lose_a_block(s: Scheduler) -> None:
    s.cache.pool.take()


def give_a_block_twice(s: Scheduler) -> None:
    s.cache.pool.give(s.running[0].blocks[-1])


def forget_a_holder(s: Scheduler) -> None:
    s.running[0].nodes[0].holders += 1


def idle_while_held(s: Scheduler) -> None:
    s.cache.trie._idle[s.running[0].nodes[0]] = None


def evict_a_parent_first(s: Scheduler) -> None:
    s.cache.trie._idle.move_to_end(next(n for n in s.cache.trie.idle_nodes() if n.children), last=False)


def run_out_of_order(s: Scheduler) -> None:
    s.running.reverse()


def hold_blocks_while_waiting(s: Scheduler) -> None:
    s.waiting[0].nodes = s.running[0].nodes


def lose_a_sequence(s: Scheduler) -> None:
    del s.sequences[2]


def promise_while_waiting(s: Scheduler) -> None:
    s.cache.promised[123] = 4


def get_ahead(s: Scheduler) -> None:
    s.running[0].computed = s.running[0].end + 1


def compute_without_blocks(s: Scheduler) -> None:
    s.running[0].planned = s.running[0].end = s.running[0].max_len = 40


def swap_blocks(s: Scheduler) -> None:
    s.running[0].blocks[0], s.running[0].blocks[1] = s.running[0].blocks[1], s.running[0].blocks[0]


def change_a_token(s: Scheduler) -> None:
    s.running[0].tokens[0] = 77


def lose_a_place(s: Scheduler) -> None:
    s.cache.states._free.pop()


def keep_a_state_of_nothing(s: Scheduler) -> None:
    s.cache.states._saved[Node(None, (), 0)] = s.cache.states._free.pop()


def save_the_past(s: Scheduler) -> None:
    s.running[0].saving = [4]


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        give_a_block_twice,
        forget_a_holder,
        idle_while_held,
        evict_a_parent_first,
        run_out_of_order,
        hold_blocks_while_waiting,
        lose_a_sequence,
        promise_while_waiting,
        get_ahead,
        compute_without_blocks,
        swap_blocks,
        change_a_token,
        lose_a_place,
        keep_a_state_of_nothing,
        save_the_past,
    ],
)
def test_damage_is_seen(scheduler: Scheduler, damage: Callable[[Scheduler], None]) -> None:
    damage(scheduler)
    with pytest.raises(AssertionError):
        check(scheduler)


def test_a_prompt_of_an_encoder_that_was_cut_is_seen() -> None:
    scheduler = Scheduler(limits(max_len=16, encoder=True))
    scheduler.add(Sequence(1, (1,) * 12, 0, private=True))
    scheduler.plan()
    check(scheduler)
    scheduler.running[0].planned = 8
    with pytest.raises(AssertionError, match="was cut at 8 of 12 tokens"):
        check(scheduler)
