"""Tests that blocks which another engine has computed enter a prefix cache, and only those that can be reused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core import Scheduler, Sequence, check, hashing
from penstock.core.adoption import StoredNode, StoredState, adopt
from penstock.core.block_events import BlockEvents
from penstock.core.prefix import PrefixNode
from tests.core.world import limits, run, step

SALT = hashing.root("a")


def chain(tokens: list[int], first_block: int = 0, number: int = 1, salt: bytes = SALT) -> list[StoredNode]:
    """Returns the nodes of a chain of 4-token blocks."""
    found: list[StoredNode] = []
    for at in range(0, len(tokens), 4):
        parent = found[-1].hash if found else salt
        block, own = first_block + at // 4, tuple(tokens[at : at + 4])
        found.append(StoredNode(number + at // 4, hashing.extend(parent, own), parent, not at, own, [block]))
    return found


def adopted(nodes: list[StoredNode], **settings: Any) -> tuple[Scheduler, int]:
    scheduler = Scheduler(limits(**settings))
    count = adopt(scheduler.cache, scheduler.limits, nodes)
    check(scheduler)
    return scheduler, count


def test_a_sequence_begins_with_what_was_adopted() -> None:
    scheduler, count = adopted(chain(list(range(12)), first_block=5))
    assert count == 3
    scheduler.add(Sequence(1, tuple(range(14)), 2, salt="a"))
    plan, _ = step(scheduler)
    assert plan.grown[0].blocks == (5, 6, 7)
    assert [(row.start, row.count) for row in plan.rows] == [(12, 2)]
    assert scheduler.stats().cached_tokens == 12


def test_another_salt_has_none_of_it() -> None:
    scheduler, _ = adopted(chain(list(range(12))))
    run(scheduler, Sequence(1, tuple(range(14)), 2, salt="b"))
    assert scheduler.stats().cached_tokens == 0


def test_what_was_stored_first_is_evicted_first_and_children_before_parents() -> None:
    shared = list(range(4))
    old = chain([*shared, 4, 5, 6, 7], number=1)
    new = chain([*shared, 8, 9, 10, 11, 1, 1, 1, 1], first_block=10, number=7)[1:]
    other = chain([9] * 8, first_block=5, number=3)
    scheduler, count = adopted([*new, *other, *old])
    assert count == 6
    order = [node.blocks for node in scheduler.cache.trie.idle if isinstance(node, PrefixNode)]
    assert order == [[1], [6], [5], [12], [11], [0]]


def broken(nodes: list[StoredNode], at: int, **changed: Any) -> list[StoredNode]:
    return [*nodes[:at], nodes[at]._replace(**changed), *nodes[at + 1 :]]


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"tokens": (1, 1, 1, 1)}, 1),  # its hash is of others
        ({"tokens": (4, 5, 6)}, 1),  # it is no whole block
        ({"blocks": [-1]}, 1),
        ({"blocks": [16]}, 1),  # there is no such block
        ({"blocks": [0]}, 1),  # another has it
        ({"parent": hashing.root("b")}, 1),  # it belongs elsewhere
        ({"first": True}, 1),  # it is a chain of its own, which no salt leads to
        ({"hash": bytes(16)}, 1),
        ({"number": 0}, 3),
    ],
)
def test_what_cannot_be_reused_is_left_out_with_all_below_it(change: dict[str, Any], left: int) -> None:
    scheduler, count = adopted(broken(chain(list(range(12))), 1, **change))
    assert count == len({block for node in scheduler.cache.trie.nodes() for block in node.blocks})
    run(scheduler, Sequence(1, tuple(range(14)), 2, salt="a"))
    assert scheduler.stats().cached_tokens == 4 * left
    assert scheduler.stats().blocks_free + scheduler.stats().blocks_cached == 16


def test_of_two_nodes_with_one_hash_the_first_is_taken() -> None:
    nodes = chain(list(range(8)))
    scheduler, count = adopted([*nodes, nodes[1]._replace(blocks=[9])])
    assert count == 2
    assert len(list(scheduler.cache.trie.nodes())) == 2


def test_windowed_blocks_may_be_missing() -> None:
    windows = (0, 6)
    nodes = [node._replace(blocks=[2 * at, 2 * at + 1]) for at, node in enumerate(chain(list(range(16))))]
    nodes[0].blocks[1] = -1
    scheduler, count = adopted(nodes, windows=windows, num_blocks=32)
    assert count == 7
    run(scheduler, Sequence(1, tuple(range(18)), 2, salt="a"))
    assert scheduler.stats().cached_tokens == 16
    nodes[3].blocks[1] = -1  # a prefix cannot end after it
    scheduler, _ = adopted(nodes, windows=windows, num_blocks=32)
    run(scheduler, Sequence(1, tuple(range(18)), 2, salt="a"))
    assert scheduler.stats().cached_tokens == 12
    nodes[1].blocks[0] = -1  # there is nothing without it
    scheduler, _ = adopted(nodes, windows=windows, num_blocks=32)
    assert len(list(scheduler.cache.trie.nodes())) == 1


def test_watchers_are_told() -> None:
    events = BlockEvents(1)
    scheduler = Scheduler(limits(), watchers=(events,))
    adopt(scheduler.cache, scheduler.limits, chain(list(range(8))))
    assert [event.hash for event in events.take()] == hashing.chain("a", list(range(8)), 4)
    scheduler.cache.flush()
    assert len(events.take()) == 2
    check(scheduler)


def test_states_are_adopted_with_their_nodes() -> None:
    nodes = chain(list(range(12)))
    scheduler = Scheduler(limits(states=3), watchers=[BlockEvents(1)])
    found = [
        StoredState(5, nodes[2].hash, 1),
        StoredState(2, nodes[1].hash, 2),
        StoredState(3, bytes(16), 0),  # of a node that is not there
        StoredState(6, nodes[1].hash, 0),  # is known by then
        StoredState(7, nodes[0].hash, 2),  # its place is taken
        StoredState(8, nodes[0].hash, 9),  # there is no such place
    ]
    assert adopt(scheduler.cache, scheduler.limits, nodes, states=found) == 3
    check(scheduler)
    saved = scheduler.cache.states.saved()
    assert {node.hash: place for node, place in saved.items()} == {nodes[2].hash: 1, nodes[1].hash: 2}
    assert list(saved.values()) == [2, 1]  # the least recently saved goes first
    scheduler.add(Sequence(1, tuple(range(14)), 2, salt="a"))
    plan, _ = step(scheduler)
    assert [(row.start, row.begin) for row in plan.rows] == [(12, 1)]
    run(scheduler, *(Sequence(id, (id,) * 20, 1) for id in range(2, 9)))
