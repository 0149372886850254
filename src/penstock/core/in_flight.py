"""Knows which prompt blocks running sequences are computing, so that others wait for them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

from penstock.core import hashing
from penstock.core.sequence import Sequence
from penstock.core.state_saving import NoSaving


class BlocksInFlight:
    """Identifies blocks by their chain hashes, which `chain` computes. `saving` decides where a sequence with recurrent
    states can begin."""

    def __init__(self, block_size: int, chain: hashing.Chain, saving: NoSaving) -> None:
        self.computing: dict[bytes, int] = {}  # chain hash of a block -> the sequence that computes it
        self._block_size = block_size
        self._chain = chain
        self._saving = saving

    def start(self, seq: Sequence, matched: int) -> None:
        self.hash_prompt(seq)
        for hash in seq.blocks.hashes[matched:]:
            self.computing.setdefault(hash, seq.id)

    def withdraw(self, seq: Sequence) -> None:
        for hash in seq.blocks.hashes[len(seq.blocks.nodes) :]:
            self.publish(seq, hash)

    def publish(self, seq: Sequence, hash: bytes) -> None:
        if self.computing.get(hash) == seq.id:
            del self.computing[hash]

    def awaited(self, seq: Sequence, matched: int, sequences: Mapping[int, Sequence]) -> bytes | None:
        if not seq.reuses_prefix:
            return None
        self.hash_prompt(seq)
        ahead = seq.blocks.hashes[matched : (len(seq.tokens) - 1) // self._block_size]
        if not ahead or ahead[0] not in self.computing:
            return None
        return self._saving.awaited(ahead, matched, sequences[self.computing[ahead[0]]], self.computing)

    def must_wait(self, seq: Sequence) -> bool:
        return seq.end > len(seq.tokens) or seq.blocks.awaited in self.computing

    def divergence(self, seq: Sequence, others: Iterable[Sequence]) -> int:
        """Returns the position, at the end of a block, up to which most of these others share its prompt; 0: none."""
        counts = Counter(self._shared(seq, other) for other in others)
        del counts[0]
        return max(counts, key=lambda at: (counts[at], at), default=0)

    def hash_prompt(self, seq: Sequence) -> None:
        if seq.blocks.prefix_cache and not seq.blocks.hashes and seq.prompt_len >= self._block_size:
            seq.blocks.hashes = self._chain(seq.blocks.salt, seq.tokens[: seq.prompt_len], self._block_size)

    def _shared(self, seq: Sequence, other: Sequence) -> int:
        """Returns how many positions of its prompt another shares. A chain hash covers all blocks before its own, so
        the last that is the same is found by bisection."""
        if not other.reuses_prefix:
            return 0
        self.hash_prompt(other)
        usable = min(len(seq.blocks.hashes), (len(other.tokens) - 1) // self._block_size, len(other.blocks.hashes))
        differ = bisect_left(range(usable), True, key=lambda at: seq.blocks.hashes[at] != other.blocks.hashes[at])
        return differ * self._block_size
