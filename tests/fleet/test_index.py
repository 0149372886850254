"""Tests that the index says what the replicas hold, whatever happens to their events."""

from __future__ import annotations

from random import Random

import pytest

from penstock.fleet.holders import DEVICE, HOST, REMOVED
from penstock.fleet.index import STRIDE, BlockIndex, Holding, Predictions


class Cache:
    """A replica's cache as a plain dictionary that evicts leaves first, and the events it sends."""

    def __init__(self) -> None:
        self.epoch = 0
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.tiers: dict[tuple[int, ...], int] = {}
        self.sent = 0

    def change(self, random: Random) -> list[tuple[int, tuple[int, ...]]]:
        """Does something that a cache may do, and returns the events."""
        changes = []
        if random.random() < 0.6 or not self.tiers:
            path = tuple(random.randrange(2) for _ in range(random.randint(1, 6)))
            changes = [(DEVICE, path[:end]) for end in range(1, len(path) + 1)]
        else:
            leaves = [each for each in self.tiers if not self.children(each, 0)]
            block = random.choice(leaves)
            to = REMOVED if self.tiers[block] == HOST or random.random() < 0.5 else HOST
            changes = [(to, block)]
            deepest = [each for each in self.tiers if self.tiers[each] == DEVICE and not self.children(each, HOST)]
            if deepest and random.random() < 0.3:
                changes = [(HOST, random.choice(deepest))]
        for tier, block in changes:
            if tier == REMOVED:
                self.tiers.pop(block)
            else:
                self.tiers[block] = tier
        return changes

    def children(self, block: tuple[int, ...], above: int) -> list[tuple[int, ...]]:
        return [each for each in self.tiers if each[:-1] == block and self.tiers[each] > above]

    def holding(self, path: list[tuple[int, ...]]) -> Holding:
        """Walks the whole prompt."""
        device = next((at for at, block in enumerate(path) if self.tiers.get(block) != DEVICE), len(path))
        held = next((at for at, block in enumerate(path) if block not in self.tiers), len(path))
        return Holding(device, held)


def check(index: BlockIndex, caches: list[Cache], live: set[int], random: Random) -> None:
    for replica, cache in enumerate(caches):
        assert index.is_live(replica) == (replica in live)
        if replica in live:
            assert index.held_by(replica) == {(tier, block) for block, tier in cache.tiers.items()}
    for _ in range(5):
        tokens = tuple(random.randrange(2) for _ in range(random.randint(0, 8)))
        path = [tokens[:end] for end in range(1, len(tokens) + 1)]
        scanned = {replica: caches[replica].holding(path) for replica in live}
        holders = index.lookup(path)
        assert {replica: holders.of(replica) or Holding(0, 0) for replica in live} == scanned
        assert all(holders.of(replica) is None for replica in range(5) if replica not in live)
        near = index.lookup(path, within=3)
        for replica in live:
            holding = near.of(replica) or Holding(0, 0)
            assert scanned[replica].held - 3 < holding.held <= scanned[replica].held
            assert scanned[replica].device - 3 < holding.device <= scanned[replica].device
        order = [scanned[replica].held for replica in holders.deepest(3)]
        assert order == sorted((each.held for each in scanned.values() if each.held), reverse=True)[:3]
        assert {scanned[replica].held > 2 for replica in holders.deepest(3, above=2)} <= {True}


@pytest.mark.parametrize("seed", range(40))
def test_the_index_equals_a_scan_of_every_cache(seed: int) -> None:
    """Events are lost, sent twice, and cut by restarts; a snapshot repairs what a gap has broken."""
    random = Random(seed)
    index, caches, live = BlockIndex(), [Cache() for _ in range(5)], set()
    for _ in range(150):
        replica = random.randrange(5)
        cache = caches[replica]
        fate = random.random()
        if fate < 0.03:
            cache.restart()
            live.discard(replica)
            index.drop(replica)
        elif fate < 0.13 and cache.sent:
            index.restore(replica, cache.epoch, cache.sent, [(tier, block) for block, tier in cache.tiers.items()])
            live.add(replica)
        else:
            first, changes = cache.sent, cache.change(random)
            cache.sent += len(changes)
            if fate < 0.20:  # lost; noticed when the next events come
                first, more = cache.sent, cache.change(random)
                cache.sent += len(more)
                assert not index.apply(replica, cache.epoch, first, more)
                live.discard(replica)
            elif index.apply(replica, cache.epoch, first, changes):
                live.add(replica)
                if fate < 0.3:
                    assert index.apply(replica, cache.epoch, first, changes)
            else:
                assert replica not in live
    check(index, caches, live, random)


def test_an_earlier_life_is_not_believed() -> None:
    index = BlockIndex()
    index.apply(0, 7, 0, [(DEVICE, "a")])
    assert index.apply(0, 8, 0, [(DEVICE, "b")])
    assert index.apply(0, 7, 1, [(DEVICE, "late")])  # ignored, and no reason to ask for a snapshot
    index.restore(0, 7, 1, [(DEVICE, "a")])
    assert index.held_by(0) == {(DEVICE, "b")}
    assert not index.apply(0, 9, 3, [(DEVICE, "c")])  # a new life whose beginning was missed
    assert not index.lookup(["c"])
    index.restore(0, 9, 4, [(DEVICE, "c"), (HOST, "d")])
    assert index.lookup(["c", "d"]).of(0) == Holding(1, 2)


def test_a_dropped_replica_is_gone_from_memory() -> None:
    index = BlockIndex()
    index.apply(0, 1, 0, [(DEVICE, "a")])
    index.apply(1, 1, 0, [(DEVICE, "a"), (DEVICE, "b")])
    index.drop(1)
    assert len(index) == 1
    assert index.lookup(["a", "b"]).of(0) == Holding(1, 1)
    assert index.lookup(["a", "b"]).of(1) is None


def test_predictions_end() -> None:
    predictions = Predictions()
    predictions.add(3, ["a", "b", "c"], until=10.0)
    predictions.add(4, ["a", "x"], until=20.0)
    assert predictions.depths(["a", "b", "y"], now=5.0) == {3: 2, 4: 1}
    predictions.expire(10.0)
    assert predictions.depths(["a", "b"], now=10.0) == {4: 1}
    predictions.expire(20.0)
    assert predictions.depths(["a"], now=20.0) == {}


def test_predictions_of_a_long_prompt_are_a_few_blocks_short_at_most() -> None:
    predictions = Predictions()
    predictions.add(0, list(range(500)), until=10.0)
    for shared in (1, 20, 32, 33, 40, 41, 333, 500):
        depth = predictions.depths([*range(shared), *range(1000, 1100)], now=0.0)[0]
        assert shared - STRIDE < depth <= shared
