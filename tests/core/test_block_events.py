"""Tests chain hashes, the events of blocks that enter and leave the prefix cache, and copies that plans carry."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from hashlib import blake2b

import pytest

from penstock.core import Scheduler, Sequence, check, hashing
from penstock.core.block_events import BlockEvents
from penstock.core.incoming import take_in
from penstock.types import BlockCopy, BlockEvent, BlockRemoved, BlockStored
from tests.core.world import limits, run, step


def follow(events: list[BlockEvent]) -> dict[bytes, BlockStored]:
    """Returns what is stored after these events, which their order alone decides."""
    stored: dict[bytes, BlockStored] = {}
    for event in events:
        if isinstance(event, BlockStored):
            assert event.hash not in stored
            stored[event.hash] = event
        else:
            del stored[event.hash]
    return stored


def test_a_chain_hash_is_of_the_parent_and_the_tokens() -> None:
    parent = blake2b(b"tenant", digest_size=16).digest()
    tokens = (1, 2, 70000)
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    expected = blake2b(parent + data, digest_size=16).digest()
    assert hashing.root("tenant") == parent
    assert hashing.extend(parent, tokens) == expected
    assert hashing.chain("tenant", (*tokens, 4, 5, 6, 7), 3) == [expected, hashing.extend(expected, (4, 5, 6))]
    assert hashing.chain("", tokens, 4) == []


def test_stored_blocks_are_told_with_their_chain_and_their_tokens() -> None:
    recorded = BlockEvents(7)
    scheduler = Scheduler(limits(), watchers=(recorded,))
    run(scheduler, Sequence(1, tuple(range(9)), 8, salt="a"))
    events = recorded.take()
    stream = (*range(9), *[50] * 7)
    assert [(event.number, event.epoch) for event in events] == [(0, 7), (1, 7), (2, 7), (3, 7)]
    assert [event.hash for event in events] == hashing.chain("a", stream, 4)
    parents = [hashing.root("a"), *hashing.chain("a", stream, 4)[:-1]]
    assert [event.parent for event in events if isinstance(event, BlockStored)] == parents
    assert [event.tokens for event in events if isinstance(event, BlockStored)][2:] == [(8, 50, 50, 50), (50,) * 4]
    assert recorded.take() == []
    run(scheduler, Sequence(2, tuple(range(9)), 8, salt="a"))  # the same blocks again are no news
    assert recorded.take() == []


@pytest.mark.parametrize("windows", [(0,), (0, 6), (6,)])
def test_events_tell_exactly_what_the_cache_has(windows: tuple[int, ...]) -> None:
    recorded = BlockEvents(1)
    scheduler = Scheduler(limits(windows=windows, num_blocks=24, max_len=32), watchers=(recorded,))
    for id in range(9):
        scheduler.add(Sequence(id, (*range(10 * (id % 3), 12), id, 5, id), 9))
    events: list[BlockEvent] = []
    while scheduler.sequences:
        step(scheduler)
        events += recorded.take()
    assert any(isinstance(event, BlockRemoved) for event in events)
    assert [event.number for event in events] == list(range(len(events)))
    nodes = {node.hash: node for node in scheduler.cache.trie.nodes()}
    assert follow(events).keys() == nodes.keys()
    assert all(event.tokens == nodes[event.hash].tokens for event in follow(events).values())


def test_another_way_to_hash_may_be_given() -> None:
    calls = []

    def chain(salt: str, tokens: Tokens[int], block_size: int) -> list[bytes]:
        calls.append(len(tokens))
        return hashing.chain(salt, tokens, block_size)

    scheduler = Scheduler(limits(), chain=chain)
    run(scheduler, Sequence(1, tuple(range(12)), 9))
    assert calls == [12]  # once, and not for the answer, of which nobody asked to hear


def test_copies_ride_in_the_next_plan_in_order() -> None:
    scheduler = Scheduler(limits())
    scheduler.copy(BlockCopy(3, 70, "out"))
    scheduler.copy(BlockCopy(4, 70, "in"))
    assert scheduler.plan().copies == (BlockCopy(3, 70, "out"), BlockCopy(4, 70, "in"))
    assert scheduler.plan().copies == ()


@pytest.mark.parametrize("windows", [(0,), (0, 6), (6,)])
def test_blocks_that_are_taken_in_are_told_reused_and_evicted_like_others(windows: tuple[int, ...]) -> None:
    recorded = BlockEvents(1)
    scheduler = Scheduler(limits(windows=windows, num_blocks=24, max_len=32), watchers=(recorded,))
    cache, prompt = scheduler.cache, tuple(range(21))
    run(scheduler, Sequence(1, prompt[:9], 1))
    wanted = [[2 + at >= start for start in cache.trie.window_starts(20)] for at in range(3)]
    filled: list[list[list[int]]] = []

    def fill(blocks: list[list[int]]) -> int:
        filled.append(blocks)
        return 2

    assert take_in(cache, "", prompt, 3, wanted, fill) == 0  # its third block is not known
    assert take_in(cache, "", prompt, 1, wanted, fill) == 0  # its second one has come meanwhile
    assert filled == []
    free = cache.available
    assert take_in(cache, "", prompt, 2, wanted, fill) == 2
    assert cache.available == free
    assert [[block >= 0 for block in blocks] for blocks in filled[0]] == wanted
    check(scheduler)
    found = cache.trie.match("", prompt, 5)
    assert [node.blocks for node in found[2:]] == filled[0][:2]
    assert follow(recorded.take()).keys() == set(hashing.chain("", prompt, 4)[: len(found)])
    assert take_in(cache, "", prompt[:16] + (7,) * 400, 4, [[True] * len(windows)] * 99, fill) == 0  # too many
    sequence = Sequence(2, prompt, 1)
    run(scheduler, sequence)
    check(scheduler)
    if windows == (0,):
        assert sequence.times.reused == (("device", 8), ("peer", 8))
        again = Sequence(3, prompt, 1)
        run(scheduler, again)
        assert dict(again.times.reused).keys() == {"device"}
    cache.flush()
    check(scheduler)
    assert cache.available == cache.pool.total
    assert cache.sources._taken_in == set()


def test_blocks_are_not_taken_in_below_what_has_left_the_device() -> None:
    scheduler = Scheduler(limits(num_blocks=8, max_len=32, host_places=16))
    run(scheduler, Sequence(1, tuple(range(9)), 1))
    run(scheduler, Sequence(2, tuple(range(50, 80)), 1))
    assert not scheduler.cache.trie.on_device(scheduler.cache.trie.match("", range(9), 2)[0])
    assert take_in(scheduler.cache, "", range(21), 2, [[True]], lambda blocks: 1) == 0
    check(scheduler)


def test_blocks_that_are_not_right_are_given_back() -> None:
    scheduler = Scheduler(limits(windows=(0, 6), num_blocks=24, max_len=32))
    cache, wanted = scheduler.cache, [[True, False], [True, False], [True, True]]
    assert take_in(cache, "", range(13), 0, wanted, lambda blocks: 0) == 0
    assert (len(cache.pool), cache.trie.match("", range(13), 3)) == (cache.pool.total, [])
    assert take_in(cache, "", range(13), 0, wanted, lambda blocks: 1) == 1
    assert len(cache.trie.match("", range(13), 3)) == 1
    check(scheduler)
