"""Maps the chain hash of a block to the replicas that hold it: two bits of one integer for each replica."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

from penstock.engine.chain_hash import native_block_table

REMOVED, HOST, DEVICE = 0, 1, 2  # where a block lies now: nowhere, in host memory, on the device
BITS = (0, 2, 3)  # index: tier; low bit: on the device, high bit: held at all

BlockChange = tuple[int, Hashable]  # tier, chain hash


class BlockTable(Protocol):
    """Keeps all replicas' bits of every block that is held at all. Replicas are small integers."""

    @property
    def get(self) -> Callable[[Any, int], int]:
        """Returns a function that looks up a block's bits, with a default."""

    def __len__(self) -> int: ...

    def write(self, replica: int, changes: Iterable[BlockChange], bits: tuple[int, int, int]) -> None:
        """Applies changes to a replica's blocks; `bits` are its bits by tier."""

    def clear(self, replica: int) -> None:
        """Takes a replica from the holders of every block."""

    def held_by(self, replica: int) -> list[tuple[int, Any]]:
        """Returns the blocks that a replica holds, each with the replica's bits."""


class PythonBlockTable:
    """Is the table in plain Python, for blocks of any hashable name."""

    def __init__(self) -> None:
        self._bits: dict[Hashable, int] = {}
        self.get = self._bits.get

    def __len__(self) -> int:
        return len(self._bits)

    def write(self, replica: int, changes: Iterable[BlockChange], bits: tuple[int, int, int]) -> None:
        table, shift = self._bits, 2 * replica
        own = ~(3 << shift)
        values = [each << shift for each in bits]
        for tier, block in changes:
            now = table.get(block, 0) & own | values[tier]
            if now:
                table[block] = now
            else:
                table.pop(block, None)

    def clear(self, replica: int) -> None:
        table, own = self._bits, 3 << 2 * replica
        for block in [block for block, bits in table.items() if bits & own]:
            rest = table[block] & ~own
            if rest:
                table[block] = rest
            else:
                del table[block]

    def held_by(self, replica: int) -> list[tuple[int, Hashable]]:
        shift = 2 * replica
        found = ((bits >> shift & 3, block) for block, bits in self._bits.items())
        return [(own, block) for own, block in found if own]


def chain_hash_table() -> BlockTable:
    """Returns the fastest table for chain hashes of 16 bytes: the native one, with one cache miss per access instead of
    four, or the Python one if the extension is not built."""
    native = native_block_table()
    return PythonBlockTable() if native is None else native
