"""Finds the cached prefix that a sequence can begin with."""

from __future__ import annotations

from penstock.core.prefix import BlockTrie, Idle, PrefixNode
from penstock.core.sequence import Sequence
from penstock.core.states import NoStates
from penstock.core.tiers import CopyCosts, HostTier


class PrefixLookup:
    """Looks prompts up in the trie. `costs` decide whether copying blocks from the host pays."""

    def __init__(self, block_size: int, trie: BlockTrie, states: NoStates, host: HostTier, costs: CopyCosts) -> None:
        self._block_size = block_size
        self._trie = trie
        self._states = states
        self._host = host
        self._costs = costs

    def match(self, seq: Sequence) -> list[PrefixNode]:
        """Returns the cached nodes of its tokens. At least the last token is always left to compute, for its logits.
        Changes nothing."""
        if not seq.reuses_prefix:
            return []
        return self._trie.match(seq.blocks.salt, seq.tokens, (len(seq.tokens) - 1) // self._block_size)

    def held(self, seq: Sequence) -> int:
        return len(self.usable(self.match(seq))) * self._block_size

    def usable(self, known: list[PrefixNode]) -> list[PrefixNode]:
        """Returns the part of a match that a sequence should begin with: up to a block where all windows are there and,
        for models with recurrent layers, a state was saved. Blocks on the host count if copying them in is at least as
        fast as computing them."""
        matched = known[: self.reusable(known)]
        absent, states = self.absent(matched), self._states.absent(matched)
        if not absent and not states:
            return matched
        here = self.reusable(known, host=False)
        missing, context = (len(matched) - here) * self._block_size, here * self._block_size
        pays = self._costs.pays_to_load(missing, context, self._host.blocks_of(absent), states)
        return matched if pays else known[:here]

    def reusable(self, known: list[PrefixNode], *, host: bool = True) -> int:
        count, usable = len(known), -1
        while count != usable:
            count = self._trie.reusable(known, count, host)
            usable, count = count, self._states.deepest(known, count, host)
        return count

    def absent(self, matched: list[PrefixNode]) -> list[Idle]:
        return self._trie.absent(matched, self._trie.window_starts(len(matched) * self._block_size))
