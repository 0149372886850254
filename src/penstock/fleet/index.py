"""Knows which replicas hold which blocks of the prefix cache, from the block events that they send.

A chain hash vouches for every block before it, and caches evict leaves first. So the replicas that hold a prompt's
blocks only fall away with depth, and a lookup bisects instead of walking the prompt. Prompts that begin alike tend to
part at the same block (the end of a system prompt), so a lookup tries that one first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from math import exp
from typing import NamedTuple

from penstock.fleet.holders import BITS, DEVICE, HOST, BlockChange, BlockTable, PythonBlockTable

MOST_FORKS = 4096  # first blocks for which the index remembers where prompts part
HEAT_MS = 10_000.0  # over which uses of a prefix are counted
MOST_HEATED = 65_536  # prefixes whose uses are counted
DENSE, STRIDE = 32, 16  # predictions remember so many leading blocks, and then one of so many


class Holding(NamedTuple):
    """Says how many leading blocks of a prompt one replica holds."""

    device: int  # in device memory
    held: int  # there or in host memory


class PrefixHolders(list[tuple[int, int]]):
    """Lists the depths at which holders of a prompt fall away, each with their bits. There are few, even where a whole
    fleet holds the beginning."""

    def of(self, replica: int) -> Holding | None:
        """Returns the blocks of one replica; None: it has none."""
        device, on_device = 0, 1 << 2 * replica
        held = on_device << 1
        for depth, bits in self:
            if bits & on_device:
                device = depth
            if bits & held:
                return Holding(device, depth)
        return None

    def deepest(self, count: int, above: int = 0) -> list[int]:
        """Returns at most `count` replicas with the most blocks, and more than `above`."""
        found: dict[int, None] = {}
        for depth, bits in reversed(self):
            if depth <= above:
                break
            while bits and len(found) < count:
                replica = (bits & -bits).bit_length() - 1 >> 1
                bits &= ~(3 << 2 * replica)
                found[replica] = None
        return list(found)


class _Feed:
    """Follows the numbered events of one replica."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.next = 0
        self.retired: set[int] = set()  # epochs of earlier lives, whose late events are ignored


class BlockIndex:
    """Maps chain hashes to replicas and tiers. Replicas are small integers. The default table takes blocks of any
    hashable name."""

    def __init__(self, table: BlockTable | None = None) -> None:
        self._table: BlockTable = PythonBlockTable() if table is None else table
        self._feeds: dict[int, _Feed] = {}
        self._live = 0  # bits of the replicas whose events have no gap
        self._forks: dict[Hashable, int] = {}  # first block -> depth where its last prompt diverged

    def __len__(self) -> int:
        return len(self._table)

    def is_live(self, replica: int) -> bool:
        return bool(self._live >> 2 * replica & 1)

    def apply(self, replica: int, epoch: int, first: int, changes: Sequence[BlockChange]) -> bool:
        """Applies changes that are numbered from `first` in the replica's epoch.

        Returns False if events before them are missing. Lookups do not name the replica then until `restore` has been
        given a snapshot. Changes that were applied before are skipped.
        """
        feed = self._feeds.setdefault(replica, _Feed())
        if epoch in feed.retired:
            return self.is_live(replica)
        if epoch != feed.epoch:
            self._begin(replica, feed, epoch, complete=first == 0)
        elif first > feed.next:
            self._live &= ~(3 << 2 * replica)
        if not self.is_live(replica):
            return False
        if first < feed.next:
            changes = changes[feed.next - first :]
        feed.next += len(changes)
        self._table.write(replica, changes, BITS)
        return True

    def restore(self, replica: int, epoch: int, following: int, held: Iterable[BlockChange]) -> None:
        """Replaces a replica's blocks by a snapshot. `following` is the number of the first event after it. A snapshot
        of an earlier life is ignored."""
        feed = self._feeds.setdefault(replica, _Feed())
        if epoch in feed.retired:
            return
        self._begin(replica, feed, epoch, complete=True)
        feed.next = following
        self._table.write(replica, held, BITS)

    def drop(self, replica: int) -> None:
        """Forgets a replica: it has left, or died. An epoch that it had is not believed again."""
        feed = self._feeds.setdefault(replica, _Feed())
        if feed.epoch is not None:
            feed.retired.add(feed.epoch)
            feed.epoch = None
        self._clear(replica)

    def lookup(self, hashes: Sequence[Hashable], within: int = 1) -> PrefixHolders:
        """Returns who holds how much of a prompt with these chain hashes. All depths but the least may be too small, by
        less than `within` blocks: each halving of the error costs one more access per depth to a table that no CPU
        cache holds."""
        found = PrefixHolders()
        if not hashes:
            return found
        get, last = self._table.get, len(hashes) - 1
        at, bits = 0, get(hashes[0], 0) & self._live
        ahead = [(last, get(hashes[last], 0))] if bits else []  # known deeper blocks, the nearest one last
        fork = self._forks.get(hashes[0], 0)
        if bits and 1 < fork < last:
            ahead += [(fork, get(hashes[fork], 0)), (fork - 1, get(hashes[fork - 1], 0))]
        while ahead:
            depth, there = ahead[-1]
            there &= bits
            if there != bits:
                if depth - at > (within if found else 1):
                    middle = (at + depth) >> 1
                    ahead.append((middle, get(hashes[middle], 0)))
                    continue
                found.append((at + 1, bits ^ there))
            at, bits = depth, there
            ahead.pop()
            if not bits:
                break
        if bits:
            found.append((last + 1, bits))
        elif found and found[0][0] != fork:
            self._remember_fork(hashes[0], found[0][0])
        return found

    def held_by(self, replica: int) -> set[BlockChange]:
        return {(DEVICE if own & 1 else HOST, block) for own, block in self._table.held_by(replica)}

    def _remember_fork(self, first: Hashable, depth: int) -> None:
        if len(self._forks) >= MOST_FORKS:
            self._forks.clear()
        self._forks[first] = depth

    def _begin(self, replica: int, feed: _Feed, epoch: int, complete: bool) -> None:
        if feed.epoch is not None and feed.epoch != epoch:
            feed.retired.add(feed.epoch)
        feed.epoch, feed.next = epoch, 0
        self._clear(replica)
        if complete:
            self._live |= 3 << 2 * replica

    def _clear(self, replica: int) -> None:
        self._live &= ~(3 << 2 * replica)
        self._table.clear(replica)


class _Prediction(NamedTuple):
    replica: int
    until: float


class Predictions:
    """Remembers which blocks a replica is about to hold because a request was just sent there.

    Without this, prompts that arrive before the first one's events would be spread over all replicas. The last decision
    about a block counts; it vouches for all blocks before it, so of a long prompt only some blocks are remembered.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, _Prediction] = {}
        self._ends: deque[tuple[_Prediction, Sequence[Hashable]]] = deque()

    def add(self, replica: int, hashes: Sequence[Hashable], until: float) -> None:
        """Predicts that a replica holds these blocks, until a time in the caller's milliseconds."""
        prediction, some = _Prediction(replica, until), _some(hashes)
        self._last.update(dict.fromkeys(some, prediction))
        self._ends.append((prediction, some))

    def expire(self, now: float) -> None:
        last = self._last
        while self._ends and self._ends[0][0].until <= now:
            prediction, some = self._ends.popleft()
            for block in some:
                if last.get(block) is prediction:
                    del last[block]

    def depths(self, hashes: Sequence[Hashable], now: float) -> dict[int, int]:
        found: dict[int, int] = {}
        if not self._last:
            return found
        for at, block in enumerate(_some(hashes)):
            prediction = self._last.get(block)
            if prediction is None:
                break
            if prediction.until > now:
                found[prediction.replica] = at + 1 if at < DENSE else DENSE + (at - DENSE) * STRIDE + 1
        return found


class PrefixHeat:
    """Counts how often prompts with the same beginning came lately."""

    def __init__(self) -> None:
        self._uses: dict[Hashable, tuple[float, float]] = {}  # a decayed count, and when it was that

    def touch(self, block: Hashable, now: float) -> float:
        """Counts a prompt that begins with this block and all before it; returns how many came before, each weighing
        less the longer ago it came. `now` is in milliseconds."""
        count, then = self._uses.get(block, (0.0, now))
        count *= exp((then - now) / HEAT_MS)
        if len(self._uses) >= MOST_HEATED:
            self._uses.clear()
        self._uses[block] = count + 1, now
        return count


def _some(hashes: Sequence[Hashable]) -> list[Hashable]:
    return [*hashes[:DENSE], *hashes[DENSE::STRIDE]]
