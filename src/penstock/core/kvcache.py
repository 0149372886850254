"""Who holds which KV block: the only writer of that fact.

A block is free (in the pool), private (one sequence is filling it), or in the trie (full; held or idle).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import takewhile

from penstock.core import hashing
from penstock.core.blocks import BlockPool
from penstock.core.prefix import BlockTrie, Node
from penstock.core.sequence import Sequence
from penstock.core.states import StatePool


class KvCache:
    def __init__(self, num_blocks: int, block_size: int, states: int = 0) -> None:
        self.block_size = block_size
        self.states = StatePool(states)
        self.pool = BlockPool(num_blocks)
        self.trie = BlockTrie(block_size)
        self.promised: dict[int, int] = {}  # chain hash of a block being computed -> sequence id

    @property
    def available(self) -> int:
        """Blocks that could be had now."""
        return len(self.pool) + self.trie.idle

    def blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def match(self, seq: Sequence) -> list[Node]:
        """What is already computed of its tokens. At least the last one is always left to compute, since its
        logits are wanted. Changes nothing."""
        if seq.private or seq.scored < seq.prompt_len:
            return []
        return self.trie.match(seq.salt, seq.tokens, (len(seq.tokens) - 1) // self.block_size)

    def usable(self, known: list[Node]) -> list[Node]:
        """What of a match a sequence can begin with: where there are states, up to the last that was saved."""
        return known[: self.states.deepest(known)] if self.states.total else known

    def awaited(self, seq: Sequence, matched: int, sequences: Mapping[int, Sequence]) -> int | None:
        """The hash of its next block, if another sequence is just computing that block; where there are states, of the
        last block that they share and that one saves its state after."""
        if seq.private or seq.scored < seq.prompt_len:
            return None
        self._hash_prompt(seq)
        mine = seq.promises[matched : (len(seq.tokens) - 1) // self.block_size]
        if not mine or mine[0] not in self.promised:
            return None
        if not self.states.total:
            return mine[0]
        other = sequences[self.promised[mine[0]]]
        theirs = takewhile(lambda promise: self.promised.get(promise) == other.id, mine)
        shared = matched + sum(1 for _ in theirs)
        saved = [at // self.block_size for at in other.saving]
        return next((seq.promises[count - 1] for count in reversed(saved) if matched < count <= shared), None)

    def parting(self, seq: Sequence, others: Iterable[Sequence]) -> int:
        """The position, at the end of a block, up to which most of these others share its prompt; 0: none does."""
        counts = Counter(self._shared(seq, other) for other in others)
        del counts[0]
        return max(counts, key=lambda at: (counts[at], at), default=0)

    def _shared(self, seq: Sequence, other: Sequence) -> int:
        """A chain hash tells of all blocks before its own, so the last that is the same can be looked for by halves."""
        if other.private or other.scored < other.prompt_len:
            return 0
        self._hash_prompt(other)
        usable = min(len(seq.promises), (len(other.tokens) - 1) // self.block_size, len(other.promises))
        differ = bisect_left(range(usable), True, key=lambda at: seq.promises[at] != other.promises[at])
        return differ * self.block_size

    def open(self, seq: Sequence, matched: list[Node]) -> None:
        """Starts a sequence on its matched prefix and promises the rest of its prompt to those who come after."""
        self.trie.hold(matched)
        seq.nodes = list(matched)
        seq.blocks = [node.block for node in matched]
        self._hash_prompt(seq)
        for promise in seq.promises[len(matched) :]:
            self.promised.setdefault(promise, seq.id)

    def grow(self, seq: Sequence, positions: int) -> tuple[int, ...]:
        """Takes the blocks that `positions` positions need; the caller has made sure they are available."""
        missing = self.blocks_for(positions) - len(seq.blocks)
        taken = tuple(self._take() for _ in range(missing))
        seq.blocks.extend(taken)
        return taken

    def enter(self, seq: Sequence) -> list[tuple[int, int]]:
        """Shares every block that has become full. Where another sequence had computed the same one, its block
        replaces ours: returns those (index, block)."""
        replaced = []
        for index in range(len(seq.nodes), seq.computed // self.block_size):
            mine = seq.blocks[index]
            node = self.trie.enter(seq.nodes, seq.salt, seq.tokens, mine)
            seq.nodes.append(node)
            if index < len(seq.promises):
                self._withdraw(seq, seq.promises[index])
            if node.block != mine:
                self.pool.give(mine)
                seq.blocks[index] = node.block
                replaced.append((index, node.block))
        return replaced

    def release(self, seq: Sequence) -> None:
        """Takes everything back from a sequence; what it shared stays in the trie until evicted."""
        self.trie.drop(seq.nodes)
        for block in seq.blocks[len(seq.nodes) :]:
            self.pool.give(block)
        for promise in seq.promises[len(seq.nodes) :]:
            self._withdraw(seq, promise)
        seq.nodes, seq.blocks = [], []

    def _take(self) -> int:
        if len(self.pool):
            return self.pool.take()
        node = self.trie.evict()
        self.states.forget(node)
        return node.block

    def _hash_prompt(self, seq: Sequence) -> None:
        if not (seq.promises or seq.private) and seq.prompt_len >= self.block_size:
            seq.promises = hashing.chain(seq.salt, seq.tokens[: seq.prompt_len], self.block_size)

    def _withdraw(self, seq: Sequence, promise: int) -> None:
        if self.promised.get(promise) == seq.id:
            del self.promised[promise]
