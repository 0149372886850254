"""Counts the prompt tokens that sequences reuse, by the tier that their KV comes from."""

from __future__ import annotations

from collections import Counter

from penstock.core.prefix import Idle, PrefixNode
from penstock.core.sequence import Sequence
from penstock.core.tiers import DEVICE, PEER, RAM


class ReuseSources:
    """Remembers which nodes came from a peer straight to the device."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._taken_in: set[PrefixNode] = set()  # from a peer, and reused by nobody yet

    def add(self, node: PrefixNode) -> None:
        """Adds a node that came from a peer."""
        self._taken_in.add(node)

    def forget(self, node: PrefixNode) -> None:
        self._taken_in.discard(node)

    def count(
        self, seq: Sequence, matched: list[PrefixNode], absent: list[Idle], tail: int
    ) -> tuple[tuple[str, int], ...]:
        """Returns how many tokens of its prompt a sequence reuses from each tier; `tail` are behind those nodes."""
        loaded = {entry if isinstance(entry, PrefixNode) else entry[0] for entry in absent}
        tokens = Counter[str]()
        for node in matched:
            position = node.depth * self._block_size
            tier = node.tier if node in loaded else PEER if node in self._taken_in else DEVICE
            tokens[tier] += min(max(seq.prompt_len - position, 0), self._block_size)
        if tail:
            tokens[DEVICE] += min(max(seq.prompt_len - len(matched) * self._block_size, 0), tail)
        for node in loaded:
            node.tier = RAM
        self._taken_in.difference_update(matched)
        return tuple((tier, count) for tier, count in tokens.items() if count)
