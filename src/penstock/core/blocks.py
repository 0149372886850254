"""The block pool: which KV blocks nobody holds."""

from __future__ import annotations


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give(self, block: int) -> None:
        self._free.append(block)

    def snapshot(self) -> frozenset[int]:
        return frozenset(self._free)
