"""Records the contents of KV blocks in memory that outlives the engine process, so that the next engine can reuse them.

There is an entry for each block. Its number is 0 while the block's contents are unknown. Else it is the serial number
of the stored node, and the rest of the entry is true: the block holds, for one layer group, the KV of these tokens
behind this parent. A process may be killed between any two writes. So an entry's number becomes 0 before the block can
be written to again, and is set when all the rest has been written: the block itself, and the rest of the entry.

A block that a sequence is still filling has an entry too: a tail, with the tokens that are computed so far. Later steps
write behind them. Their additions are recorded after they are computed: first the tokens, then their count. Tails are
of no use to models with recurrent layers, whose states are saved at the ends of blocks.

Behind the blocks' entries there is an entry for each place of a saved state: a number, which means the same, and the
chain hash of the block at whose end it was saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from mmap import mmap
from struct import Struct, calcsize, pack

import numpy as np
from numpy.typing import NDArray

from penstock.core import Sequence as Stream
from penstock.core import hashing
from penstock.core.adoption import StoredNode, StoredState, StoredTail, adopt
from penstock.core.kvcache import KvCache
from penstock.core.prefix import PrefixNode
from penstock.types import Limits

NUMBER = 8  # bytes
LENGTH_AT = NUMBER  # in an entry: how many of its tokens count
REST_AT = LENGTH_AT + NUMBER
ABOUT = f"<{hashing.SIZE}s{hashing.SIZE}s?xH"  # hash (tails lack one), parent, whether it is a first block, group
TOKENS_AT = REST_AT + calcsize(ABOUT)
TOKEN = 4  # bytes
STATE_STRIDE = NUMBER + hashing.SIZE  # bytes of a state's entry
Memory = bytearray | mmap


def ledger_bytes(limits: Limits) -> int:
    return limits.num_blocks * _stride(limits) + limits.states * STATE_STRIDE


class KvLedger:
    """Implements BlockWatcher over `ledger_bytes` of memory. It records additions when `settle` is called, and removals
    at once."""

    def __init__(self, memory: Memory, limits: Limits) -> None:
        self._memory = memory
        self._limits = limits
        self._entry, self._stride = _entry(limits), _stride(limits)
        self._state_entry, self._states_at = Struct(f"{hashing.SIZE}s"), limits.num_blocks * self._stride
        self._words = memoryview(memory).cast("Q")
        self._pending: dict[PrefixNode, int] = {}  # nodes that are not noted yet, in order, with the `settle` before
        self._noted: dict[PrefixNode, list[int]] = {}  # nodes, and the blocks that they had then
        self._pending_states: dict[int, tuple[PrefixNode, int]] = {}  # keys are places; with the `settle` before
        self._tails: dict[int, int] = {}  # how many tokens are noted of blocks that are not full
        self._lengths: dict[int, int] = {}  # how many tokens those blocks had at the last `settle`
        self._settled = 0  # times
        self._frozen = False
        self._count = int(max(self._numbers().max(initial=0), self._state_numbers().max(initial=0)))  # so far

    def adopt_into(self, cache: KvCache) -> int:
        """Puts what the engine before has noted into an empty prefix cache that this ledger watches, and forgets the
        rest; returns the number of blocks."""
        blocks = adopt(cache, self._limits, *self._read())
        unused = np.ones(self._limits.num_blocks, bool)
        unused[list(cache.tails.blocks)] = False
        for node in self._pending:
            self._noted[node] = list(node.blocks)
            unused[[block for block in node.blocks if block >= 0]] = False
        self._numbers()[unused] = 0
        self._pending.clear()
        kept = set(cache.states.saved().values())
        for place in range(self._limits.states):
            if place not in kept:
                self.state_lost(place)
        return blocks

    @property
    def pending(self) -> bool:
        return bool(self._pending or self._pending_states)

    def settle(self, running: Iterable[Stream] = (), late: int = 0) -> None:
        """Records the nodes stored since the last call, and how far the running sequences have come. Everything that
        writes to those blocks, or to those positions, has ended. If steps that may write to them are still in flight,
        the call is `late`: it records only the additions up to the previous call."""
        self._settled += 1
        due = self._settled - bool(late)
        for node in [node for node, since in self._pending.items() if since < due]:
            del self._pending[node]
            self._count += 1
            for group, block in enumerate(node.blocks):
                if block >= 0:
                    self._write(node, group, block)
            self._noted[node] = list(node.blocks)
        self._settle_states(due)
        before, self._lengths = self._lengths, {}
        for seq in () if self._frozen or self._limits.states else running:
            full, length = divmod(seq.computed, self._limits.block_size)
            if length and full == len(seq.blocks.nodes) and seq.blocks.prefix_cache:
                blocks = [table[full] for table in seq.blocks.tables]
                self._lengths[blocks[0]] = length
                if written := min(length, before.get(blocks[0], 0)) if late else length:
                    self._note_tail(seq, blocks, written)

    def freeze(self) -> None:
        """Stops recording nodes: the next engine may begin with other weights."""
        self._frozen = True

    # -- as a BlockWatcher ---------------------------------------------------------------------------------------

    def stored(self, node: PrefixNode, parent: bytes) -> None:
        self._forget_tails(node)
        if not self._frozen:
            self._pending[node] = self._settled

    def changed(self, node: PrefixNode) -> None:
        self._forget_tails(node)
        if (blocks := self._noted.get(node)) is not None:
            self._forget(block for block in blocks if block not in node.blocks)
            self._pending[node] = self._settled

    def removed(self, node: PrefixNode) -> None:
        self._pending.pop(node, None)
        self._forget(self._noted.pop(node, ()))

    def freed(self, block: int) -> None:
        self._lengths.pop(block, None)
        if self._tails.pop(block, 0):
            self._forget([block])

    def state_saved(self, node: PrefixNode, place: int) -> None:
        if not self._frozen:
            self._pending_states[place] = node, self._settled

    def state_lost(self, place: int) -> None:
        self._pending_states.pop(place, None)
        self._words[(self._states_at + place * STATE_STRIDE) // NUMBER] = 0

    def _forget_tails(self, node: PrefixNode) -> None:
        for block in node.blocks:
            self.freed(block)

    # -- entries -------------------------------------------------------------------------------------------------

    def _settle_states(self, due: int) -> None:
        """Notes the states that were saved before a call of `settle`, at the ends of nodes whose hash is known."""
        for place, node in [(place, node) for place, (node, since) in self._pending_states.items() if since < due]:
            if not node.hash:
                continue
            del self._pending_states[place]
            self._count += 1
            at = self._states_at + place * STATE_STRIDE
            self._words[at // NUMBER] = 0
            self._state_entry.pack_into(self._memory, at + NUMBER, node.hash)
            self._words[at // NUMBER] = self._count

    def _state_numbers(self) -> NDArray[np.uint64]:
        return np.frombuffer(self._memory, np.uint64)[self._states_at // NUMBER :][:: STATE_STRIDE // NUMBER]

    def _numbers(self, at: int = 0) -> NDArray[np.uint64]:
        """Returns the numbers of all entries, or what they have `at` another place, by block. They can be changed
        there."""
        words = self._stride // NUMBER
        return np.frombuffer(self._memory, np.uint64)[at // NUMBER : self._limits.num_blocks * words : words]

    def _forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block >= 0:
                self._words[block * self._stride // NUMBER] = 0

    def _write(self, node: PrefixNode, group: int, block: int) -> None:
        above, first = node.parent, node.depth == 0
        assert above is not None
        parent = node.salt_hash if first else above.hash
        self._write_entry(block, self._limits.block_size, (node.hash, parent, first, group, *node.tokens))

    def _write_entry(self, block: int, length: int, about: tuple[object, ...]) -> None:
        at = block * self._stride
        self._words[at // NUMBER] = 0
        self._words[(at + LENGTH_AT) // NUMBER] = length
        self._entry.pack_into(self._memory, at + REST_AT, *about)
        self._words[at // NUMBER] = self._count

    def _note_tail(self, seq: Stream, blocks: Sequence[int], length: int) -> None:
        """Notes the tokens that a sequence has in blocks which are not full, or those that it has more than before."""
        size, noted = self._limits.block_size, self._tails.get(blocks[0], 0)
        parent = seq.blocks.nodes[-1].hash if seq.blocks.nodes else hashing.root(seq.blocks.salt)
        if noted == length or not parent:
            return
        tokens = seq.tokens[len(seq.blocks.nodes) * size :][:length]
        if noted:
            added = pack(f"<{length - noted}i", *tokens[noted:])
            for block in blocks:
                at = block * self._stride
                first = at + TOKENS_AT + noted * TOKEN
                self._memory[first : first + len(added)] = added
                self._words[(at + LENGTH_AT) // NUMBER] = length
        else:
            self._count += 1
            about = b"", parent, not seq.blocks.nodes
            for group, block in enumerate(blocks):
                self._write_entry(block, length, (*about, group, *tokens, *[0] * (size - length)))
        self._tails.update(dict.fromkeys(blocks, length))

    def _read(self) -> tuple[list[StoredNode], list[StoredTail], list[StoredState]]:
        """Returns the nodes and the tails of which blocks are noted, and the states. Entries that contradict each other
        are left out."""
        nodes: dict[bytes, StoredNode] = {}
        tails: dict[int, StoredTail] = {}  # keys are serial numbers
        numbers, lengths = self._numbers(), self._numbers(LENGTH_AT)
        for block in np.flatnonzero(numbers).tolist():
            at, number = block * self._stride, int(numbers[block])
            hash, parent, first, group, *tokens = self._entry.unpack_from(self._memory, at + REST_AT)
            length, missing = int(lengths[block]), [-1] * len(self._limits.windows)
            found: StoredNode | StoredTail
            if length == len(tokens):
                found = StoredNode(number, hash, parent, first, tuple(tokens), missing)
                known: StoredNode | StoredTail = nodes.setdefault(hash, found)
            else:
                found = StoredTail(parent, first, tuple(tokens[:length]), missing)
                known = tails[number] = _shorter(tails.get(number, found), found)
            if _agree(known, found) and group < len(missing) and known.blocks[group] < 0:
                known.blocks[group] = block
        return list(nodes.values()), list(tails.values()), list(self._read_states())

    def _read_states(self) -> Iterator[StoredState]:
        for place, number in enumerate(self._state_numbers()[: self._limits.states].tolist()):
            if number:
                at = self._states_at + place * STATE_STRIDE + NUMBER
                (hash,) = self._state_entry.unpack_from(self._memory, at)
                yield StoredState(number, hash, place)


def _shorter(tail: StoredTail, other: StoredTail) -> StoredTail:
    """Returns a tail cut to the length of another: a process may have ended after it recorded only one layer group's
    tokens."""
    return tail if len(tail.tokens) <= len(other.tokens) else tail._replace(tokens=other.tokens)


def _agree(known: StoredNode | StoredTail, found: StoredNode | StoredTail) -> bool:
    count = min(len(known.tokens), len(found.tokens))
    same = known.tokens[:count] == found.tokens[:count]
    return same and (known.parent, known.first) == (found.parent, found.first)


def _entry(limits: Limits) -> Struct:
    return Struct(f"{ABOUT}{limits.block_size}i")


def _stride(limits: Limits) -> int:
    return -(-(REST_AT + _entry(limits).size) // NUMBER) * NUMBER
