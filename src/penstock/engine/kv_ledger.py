"""Notes in memory that outlives the engine process which KV block holds what, so that the next engine can reuse it.

There is an entry for each block. Its number is 0 while nothing is known of the block. Else it counts the nodes that
were stored, and the rest of the entry is true: the block holds, for one layer group, the KV of these tokens behind this
parent. A process may be killed between any two writes. So an entry's number becomes 0 before the block can be written
to again, and is set when all that it stands for has been written: the block itself, and the rest of the entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from mmap import mmap
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from penstock.core import hashing
from penstock.core.adoption import StoredNode, adopt
from penstock.core.kvcache import KvCache
from penstock.core.prefix import PrefixNode
from penstock.types import Limits

NUMBER = 8  # bytes
Memory = bytearray | mmap


def ledger_bytes(limits: Limits) -> int:
    """Returns the bytes of a ledger of all blocks."""
    return limits.num_blocks * _stride(limits)


class KvLedger:
    """Implements BlockWatcher over `ledger_bytes` of memory. It notes what was stored when `settle` is called, and what
    was removed at once."""

    def __init__(self, memory: Memory, limits: Limits) -> None:
        self._memory = memory
        self._limits = limits
        self._entry, self._stride = _entry(limits), _stride(limits)
        self._words = memoryview(memory).cast("Q")
        self._pending: dict[PrefixNode, None] = {}  # nodes that were stored since the last `settle`, in order
        self._noted: dict[PrefixNode, list[int]] = {}  # nodes, and the blocks that they had then
        self._frozen = False
        self._count = int(self._numbers().max(initial=0))  # of nodes that were stored

    def adopt_into(self, cache: KvCache) -> int:
        """Puts what the engine before has noted into an empty prefix cache that this ledger watches, and forgets the
        rest; returns the number of blocks."""
        blocks = adopt(cache, self._limits, self._read())
        unused = np.ones(self._limits.num_blocks, bool)
        for node in self._pending:
            self._noted[node] = list(node.blocks)
            unused[[block for block in node.blocks if block >= 0]] = False
        self._numbers()[unused] = 0
        self._pending.clear()
        return blocks

    def settle(self) -> None:
        """Notes what was stored since the last call. Everything that writes to those blocks has ended."""
        for node in self._pending:
            self._count += 1
            for group, block in enumerate(node.blocks):
                if block >= 0:
                    self._write(node, group, block)
            self._noted[node] = list(node.blocks)
        self._pending.clear()

    def freeze(self) -> None:
        """Lets no more nodes be noted: they would be of other weights than those that the next engine begins with."""
        self._frozen = True

    # -- as a BlockWatcher ---------------------------------------------------------------------------------------

    def stored(self, node: PrefixNode, parent: bytes) -> None:
        if not self._frozen:
            self._pending[node] = None

    def changed(self, node: PrefixNode) -> None:
        if (blocks := self._noted.get(node)) is not None:
            self._forget(block for block in blocks if block not in node.blocks)
            self._pending[node] = None

    def removed(self, node: PrefixNode) -> None:
        self._pending.pop(node, None)
        self._forget(self._noted.pop(node, ()))

    # -- entries -------------------------------------------------------------------------------------------------

    def _numbers(self) -> NDArray[np.uint64]:
        """Returns the numbers of all entries, by block. They can be changed there."""
        words = self._stride // NUMBER
        return np.frombuffer(self._memory, np.uint64)[: self._limits.num_blocks * words : words]

    def _forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block >= 0:
                self._words[block * self._stride // NUMBER] = 0

    def _write(self, node: PrefixNode, group: int, block: int) -> None:
        above, first = node.parent, node.depth == 0
        assert above is not None
        parent = node.salt_hash if first else above.hash
        at = block * self._stride
        self._words[at // NUMBER] = 0
        self._entry.pack_into(self._memory, at + NUMBER, node.hash, parent, first, group, *node.tokens)
        self._words[at // NUMBER] = self._count

    def _read(self) -> list[StoredNode]:
        """Returns the nodes of which blocks are noted. Entries that contradict each other are left out."""
        nodes: dict[bytes, StoredNode] = {}
        numbers = self._numbers()
        for block in np.flatnonzero(numbers).tolist():
            about = self._entry.unpack_from(self._memory, block * self._stride + NUMBER)
            hash, parent, first, group, *tokens = about
            missing = [-1] * len(self._limits.windows)
            found = StoredNode(int(numbers[block]), hash, parent, first, tuple(tokens), missing)
            node = nodes.setdefault(hash, found)
            if node[2:5] == found[2:5] and group < len(missing) and node.blocks[group] < 0:
                node.blocks[group] = block
        return list(nodes.values())


def _entry(limits: Limits) -> Struct:
    """Returns the form of an entry behind its number: hash, parent, whether it is a first block, group, tokens."""
    return Struct(f"<{hashing.SIZE}s{hashing.SIZE}s?xH{limits.block_size}i")


def _stride(limits: Limits) -> int:
    """Returns the bytes of an entry: whole numbers."""
    return -(-(NUMBER + _entry(limits).size) // NUMBER) * NUMBER
