"""Keeps the pool of KV blocks that nobody holds."""

from __future__ import annotations

from collections.abc import Iterable, Set


class BlockPool:
    """Hands out free blocks. Any block can serve any layer group."""

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        """Returns how many blocks are free."""
        return len(self._free)

    def take(self) -> int:
        """Removes a free block from the pool and returns it."""
        return self._free.pop()

    def upcoming(self, count: int) -> list[int]:
        """Returns the blocks that are handed out next, as many as there are of `count`."""
        return self._free[: -count - 1 : -1]

    def remove(self, blocks: Set[int]) -> None:
        """Removes these blocks from the pool."""
        self._free = [block for block in self._free if block not in blocks]

    def defer(self, blocks: Set[int]) -> None:
        """Lets free blocks be taken after all others."""
        self._free = [*blocks, *(block for block in self._free if block not in blocks)]

    def take_these(self, blocks: Iterable[int]) -> None:
        """Removes free blocks that were deferred."""
        for block in blocks:
            self._free.remove(block)

    def give(self, block: int) -> None:
        """Returns a block to the pool."""
        self._free.append(block)

    def snapshot(self) -> frozenset[int]:
        """Returns the blocks that are free now."""
        return frozenset(self._free)
