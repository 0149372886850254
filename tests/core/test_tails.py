"""Tests that a sequence goes on where another engine has computed a part of its last block, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core import Scheduler, Sequence, check, hashing
from penstock.core.adoption import StoredTail, adopt
from penstock.core.prefix import PrefixNode
from tests.core.test_adoption import SALT, chain
from tests.core.world import limits, run, step

NODES = chain(list(range(8)), first_block=5)
TAIL = StoredTail(NODES[-1].hash, False, (8, 9, 10), [3])


class FreedBlocks:
    """Notes which blocks may be written to."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def stored(self, node: PrefixNode, parent: bytes) -> None: ...
    def changed(self, node: PrefixNode) -> None: ...
    def removed(self, node: PrefixNode) -> None: ...
    def state_saved(self, node: PrefixNode, place: int) -> None: ...
    def state_lost(self, place: int) -> None: ...

    def freed(self, block: int) -> None:
        self.blocks.append(block)


def adopted(*tails: StoredTail, nodes: Any = NODES, **settings: Any) -> tuple[Scheduler, FreedBlocks]:
    watcher = FreedBlocks()
    scheduler = Scheduler(limits(**settings), watchers=(watcher,))
    assert adopt(scheduler.cache, scheduler.limits, nodes, tails) == sum(len(node.blocks) for node in nodes)
    check(scheduler)
    return scheduler, watcher


def begin(scheduler: Scheduler, seq: Sequence) -> list[tuple[int, int]]:
    """Returns where the rows of the first step begin, and how many tokens they have."""
    scheduler.add(seq)
    plan, _ = step(scheduler)
    check(scheduler)
    return [(row.start, row.count) for row in plan.rows]


def test_a_sequence_goes_on_behind_a_tail_in_its_block() -> None:
    scheduler, watcher = adopted(TAIL)
    assert begin(scheduler, Sequence(1, tuple(range(12)), 2, salt="a")) == [(11, 1)]
    assert scheduler.sequences[1].blocks.tables == [[5, 6, 3]]
    assert scheduler.stats().cached_tokens == 11
    assert scheduler.stats().reused == (("device", 11),)
    assert not watcher.blocks
    run(scheduler)
    assert scheduler.stats().blocks_free + scheduler.stats().blocks_cached == 16


def test_tokens_of_an_answer_are_not_counted_as_a_cached_prompt() -> None:
    scheduler, _ = adopted(TAIL)
    resumed = Sequence(1, tuple(range(6)), 8, salt="a", generated=(6, 7, 8, 9, 10, 11))
    assert begin(scheduler, resumed) == [(11, 1)]
    assert scheduler.stats().reused == (("device", 6),)


@pytest.mark.parametrize(
    ("prompt", "row"),
    [
        ((*range(10),), (9, 1)),  # the tail is longer: its last tokens are computed again
        ((*range(9), 1, 2), (9, 2)),  # only its first token is the same
        ((*range(8), 1, 9, 10), (8, 3)),
        ((*range(9),), (8, 1)),  # the last token is always computed
        ((*range(7), 8, 8, 9, 10), (4, 7)),  # it follows another block
    ],
)
def test_as_much_of_a_tail_is_used_as_is_the_same(prompt: tuple[int, ...], row: tuple[int, int]) -> None:
    scheduler, _ = adopted(TAIL)
    assert begin(scheduler, Sequence(1, prompt, 2, salt="a")) == [row]


def test_the_longest_tail_is_used_and_each_once() -> None:
    short, other = TAIL._replace(tokens=(8, 9), blocks=[4]), TAIL._replace(tokens=(8, 1), blocks=[9])
    scheduler, _ = adopted(short, TAIL, other)
    prompt = tuple(range(12))
    assert begin(scheduler, Sequence(1, prompt, 9, salt="a")) == [(11, 1)]
    assert (10, 2) in begin(scheduler, Sequence(2, prompt, 9, salt="a"))
    assert len(scheduler.cache.tails) == 1


def test_a_first_block_belongs_to_its_salt() -> None:
    first = StoredTail(SALT, True, (1, 2), [3])
    scheduler, _ = adopted(first, nodes=[])
    assert begin(scheduler, Sequence(1, (1, 2, 3), 2, salt="b")) == [(0, 3)]
    assert begin(scheduler, Sequence(2, (1, 2, 3), 2, salt="a", prefix_cache=False))[-1] == (0, 3)
    assert begin(scheduler, Sequence(3, (1, 2, 3), 2, salt="a"))[-1] == (2, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"parent": hashing.root("b")},
        {"tokens": ()},
        {"tokens": (8, 9, 10, 11)},  # it would be a node
        {"blocks": [-1]},
        {"blocks": [16]},  # there is no such block
        {"blocks": [5]},  # a node has it
    ],
)
def test_a_tail_that_cannot_be_right_is_left_out(change: dict[str, Any]) -> None:
    scheduler, _ = adopted(TAIL._replace(**change))
    assert not scheduler.cache.tails
    assert begin(scheduler, Sequence(1, tuple(range(12)), 2, salt="a")) == [(8, 4)]


def test_of_two_tails_with_one_block_the_first_is_kept() -> None:
    scheduler, _ = adopted(TAIL, TAIL._replace(tokens=(1,)))
    assert begin(scheduler, Sequence(1, (*range(8), 1, 2), 2, salt="a")) == [(8, 2)]


def test_blocks_of_tails_are_taken_last_and_forgotten_then() -> None:
    scheduler, watcher = adopted(TAIL, num_blocks=8, max_len=28)
    taken = [scheduler.cache.take() for _ in range(7)]  # first the free ones, then those of idle nodes
    assert {*taken[:5]} == {0, 1, 2, 4, 7}
    assert (len(scheduler.cache.tails), watcher.blocks) == (1, [])
    assert scheduler.cache.take() == 3
    assert (len(scheduler.cache.tails), watcher.blocks) == (0, [3])


def test_a_sequence_may_start_in_the_room_that_is_left_in_its_tail() -> None:
    scheduler, _ = adopted(TAIL, num_blocks=8, max_len=28)
    for _ in range(5):
        scheduler.cache.take()  # no other block is left
    scheduler.add(Sequence(1, tuple(range(12)), 1, salt="a"))
    assert [(row.start, row.count) for row in scheduler.plan().rows] == [(11, 1)]


def test_windowed_layer_groups_have_a_block_each() -> None:
    nodes = [node._replace(blocks=[2 * at, 2 * at + 1]) for at, node in enumerate(chain(list(range(8))))]
    tail = TAIL._replace(blocks=[7, 8])
    scheduler, _ = adopted(tail, nodes=nodes, windows=(0, 6), num_blocks=40)
    assert begin(scheduler, Sequence(1, tuple(range(12)), 3, salt="a")) == [(11, 1)]
    assert [table[-1] for table in scheduler.sequences[1].blocks.tables] == [7, 8]
    run(scheduler)
    check(scheduler)


def test_a_flushed_cache_has_no_tails() -> None:
    scheduler, watcher = adopted(TAIL, StoredTail(SALT, True, (1, 2), [9]))
    scheduler.cache.flush()
    assert sorted(watcher.blocks) == [3, 9]
    assert not scheduler.cache.tails
    check(scheduler)


def test_watchers_are_told_which_blocks_sequences_give_back() -> None:
    scheduler, watcher = adopted(nodes=[])
    scheduler.add(Sequence(1, (1, 2, 3, 4, 5), 9))
    step(scheduler)
    own = scheduler.sequences[1].blocks.tables[0][1]
    scheduler.abort(1)
    assert watcher.blocks == [own]
