"""Keeps the KV blocks that nobody holds. Some of them have a tail: the last tokens of a stream, less than a block.

Only blocks that another engine has left have tails. They are free, and are taken after all others, so that resumed
streams find their tails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from itertools import takewhile
from typing import NamedTuple

from penstock.core.prefix import PrefixNode


class BlockPool:
    """Hands out free blocks. Any block can serve any layer group."""

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def upcoming(self, count: int) -> list[int]:
        return self._free[: -count - 1 : -1]

    def remove(self, blocks: Set[int]) -> None:
        self._free = [block for block in self._free if block not in blocks]

    def defer(self, blocks: Set[int]) -> None:
        self._free = [*blocks, *(block for block in self._free if block not in blocks)]

    def take_these(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._free.remove(block)

    def give(self, block: int) -> None:
        self._free.append(block)

    def snapshot(self) -> frozenset[int]:
        return frozenset(self._free)


Parent = PrefixNode | bytes  # the block before, or the hash of the salt


class Tail(NamedTuple):
    """Says which tokens blocks hold behind a parent. They may have room for more."""

    parent: Parent
    tokens: tuple[int, ...]
    blocks: list[int]  # an id for each layer group

    @property
    def start(self) -> tuple[Parent, int]:
        return self.parent, self.tokens[0]


class Tails:
    """Finds the tail that a stream can continue."""

    def __init__(self) -> None:
        self._by_start: defaultdict[tuple[Parent, int], list[Tail]] = defaultdict(list)
        self._by_block: dict[int, Tail] = {}

    @property
    def blocks(self) -> frozenset[int]:
        return frozenset(self._by_block)

    def __len__(self) -> int:
        return len(self._by_block)

    def add(self, tail: Tail) -> None:
        self._by_start[tail.start].append(tail)
        self._by_block.update(dict.fromkeys(tail.blocks, tail))

    def longest(self, parent: Parent, tokens: Sequence[int]) -> tuple[int, Tail | None]:
        """Returns the tail behind `parent` that has the most of the tokens at its beginning, and how many that are; 0:
        there is none."""
        known = self._by_start.get((parent, tokens[0]), ()) if tokens else ()
        shared = ((_shared(tail.tokens, tokens), tail) for tail in known)
        return max(shared, key=lambda each: each[0], default=(0, None))

    def holding(self, block: int) -> Tail | None:
        return self._by_block.get(block)

    def remove(self, tail: Tail) -> None:
        for block in tail.blocks:
            del self._by_block[block]
        left = self._by_start[tail.start]
        left.remove(tail)
        if not left:
            del self._by_start[tail.start]


def _shared(some: Sequence[int], others: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))
