"""Tests that the invariants can fail: each kind of damage is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.core import Scheduler, Sequence, check
from penstock.core.prefix import PrefixNode
from penstock.core.states import SavedStates
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
    s.cache.pool.give(s.running[0].blocks.tables[0][-1])


def forget_a_holder(s: Scheduler) -> None:
    s.running[0].blocks.nodes[0].holders += 1


def idle_while_held(s: Scheduler) -> None:
    s.cache.trie.idle.add(s.running[0].blocks.nodes[0])


def evict_a_parent_first(s: Scheduler) -> None:
    s.cache.trie.idle._blocks.move_to_end(
        next(n for n in s.cache.trie.idle if isinstance(n, PrefixNode) and n.children), last=False
    )


def run_out_of_order(s: Scheduler) -> None:
    s.running.reverse()


def hold_blocks_while_waiting(s: Scheduler) -> None:
    next(iter(s.tenants)).line[0].blocks.nodes = s.running[0].blocks.nodes


def lose_a_sequence(s: Scheduler) -> None:
    del s.sequences[2]


def compute_while_waiting(s: Scheduler) -> None:
    s.cache.in_flight.computing[b"hash"] = 4


def get_ahead(s: Scheduler) -> None:
    s.running[0].computed = s.running[0].end + 1


def compute_without_blocks(s: Scheduler) -> None:
    s.running[0].planned = s.running[0].end = s.running[0].max_len = 40


def swap_blocks(s: Scheduler) -> None:
    table = s.running[0].blocks.tables[0]
    table[0], table[1] = table[1], table[0]


def change_a_token(s: Scheduler) -> None:
    s.running[0].tokens[0] = 77


def publish_a_block_that_is_not_full(s: Scheduler) -> None:
    node = s.running[0].blocks.nodes[0]
    node.key = node.key[:-1]


def compute_an_unknown_token(s: Scheduler) -> None:
    seq = s.running[0]
    seq.computed = seq.planned = seq.end = len(seq.tokens) + 1


def lose_a_place(s: Scheduler) -> None:
    assert isinstance(s.cache.states, SavedStates)
    s.cache.states._free.pop()


def keep_a_state_of_nothing(s: Scheduler) -> None:
    states = s.cache.states
    assert isinstance(states, SavedStates)
    states._saved[PrefixNode(None, (), [0], [])] = states._free.pop()


def save_the_past(s: Scheduler) -> None:
    s.running[0].states.saving = [4]


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
        compute_while_waiting,
        get_ahead,
        compute_without_blocks,
        swap_blocks,
        change_a_token,
        publish_a_block_that_is_not_full,
        compute_an_unknown_token,
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
    scheduler.add(Sequence(1, (1,) * 12, 0, prefix_cache=False))
    scheduler.plan()
    check(scheduler)
    scheduler.running[0].planned = 8
    with pytest.raises(AssertionError, match="was cut at 8 of 12 tokens"):
        check(scheduler)


# -- windows -----------------------------------------------------------------------------------------------------


def lose_a_full_block(s: Scheduler) -> None:
    node = s.running[0].blocks.nodes[0]
    s.cache.pool.give(node.blocks[0])
    node.blocks[0] = s.running[0].blocks.tables[0][0] = -1


def forget_a_window_holder(s: Scheduler) -> None:
    s.running[0].blocks.nodes[-1].window_holders[1] += 1


def lose_a_held_window(s: Scheduler) -> None:
    node = s.running[0].blocks.nodes[-1]
    s.cache.pool.give(node.blocks[1])
    node.blocks[1] = -1


def rest_in_no_queue(s: Scheduler) -> None:
    s.cache.trie.idle._blocks.popitem(last=False)
    s.cache.trie.idle_blocks -= 1


def miscount_idle_blocks(s: Scheduler) -> None:
    s.cache.trie.idle_blocks += 1


def let_go_of_what_is_seen(s: Scheduler) -> None:
    seq = s.running[0]
    s.cache.trie.drop_window(seq.blocks.nodes[seq.blocks.window_starts[1]], 1)
    seq.blocks.window_starts[1] += 1


def keep_what_is_behind(s: Scheduler) -> None:
    seq = s.running[0]
    for _ in range(2):
        seq.blocks.window_starts[1] -= 1
        node = seq.blocks.nodes[seq.blocks.window_starts[1]]
        s.cache.trie._hold_window(node, 1)
        seq.blocks.tables[1][seq.blocks.window_starts[1]] = node.blocks[1]


def grow_unevenly(s: Scheduler) -> None:
    s.running[0].blocks.tables[1].append(s.cache.pool.take())


@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (lose_a_full_block, "lost its blocks of full layer groups"),
        (forget_a_window_holder, "group 1: 2 holders, not 1"),
        (lose_a_held_window, "held and gone in group 1"),
        (rest_in_no_queue, "wrongly idle"),
        (miscount_idle_blocks, "counted as idle"),
        (let_go_of_what_is_seen, "still sees in group 1"),
        (keep_what_is_behind, "behind its window"),
        (grow_unevenly, "differ in length"),
    ],
)
def test_damage_to_windows_is_seen(damage: Callable[[Scheduler], None], seen: str) -> None:
    scheduler = Scheduler(limits(windows=(0, 6), num_blocks=64))
    scheduler.add(Sequence(1, tuple(range(30)), 9))
    for _ in range(2):
        step(scheduler)
    damage(scheduler)
    with pytest.raises(AssertionError, match=seen):
        check(scheduler)


def test_a_node_without_blocks_that_nobody_needs_is_seen() -> None:
    scheduler = Scheduler(limits(windows=(6,)))
    run(scheduler, Sequence(1, tuple(range(9)), 1))
    parent = next(scheduler.cache.trie.nodes())
    parent.children[(1, 2, 3, 4)] = child = PrefixNode(parent, (1, 2, 3, 4), [-1], [0])
    child.holders = 0
    with pytest.raises(AssertionError, match="nobody needs has no blocks"):
        check(scheduler)


def test_a_block_that_is_not_full_is_not_published() -> None:
    trie = Scheduler(limits()).cache.trie
    with pytest.raises(AssertionError, match="not full"):
        trie.publish([], "", [1, 2, 3], [0])
