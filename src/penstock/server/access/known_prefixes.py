"""Remembers the prompts of an engine, to predict how much of the next one has to be computed.

A block is remembered from the moment when a prompt with it is admitted: requests that wait together and share a prefix
have it computed once. With each first token the engine reports the number of reused tokens. They teach two shares: the
share of remembered tokens that are still cached, and the share of other tokens that are cached all the same (on disk,
or because another client of the engine has sent them).

Everything here is pure: it reads no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

KEEP = 0.9  # share of earlier observations that each new one keeps
PRIOR = 512.0  # tokens: the weight of the first belief about a share


class TokenShare:
    """Averages a share of tokens over the latest requests."""

    def __init__(self, first: float) -> None:
        self._part, self._whole = first * PRIOR, PRIOR

    def observe(self, part: float, whole: float) -> None:
        """Takes `part` of the `whole` tokens of one request."""
        if whole > 0:
            self._part, self._whole = KEEP * self._part + part, KEEP * self._whole + whole

    @property
    def value(self) -> float:
        return self._part / self._whole


class BlockChain:
    """Hashes the full blocks of one prompt and of its answer. Each hash vouches for all blocks before it. It is
    Python's hash, so it means nothing in another process."""

    __slots__ = ("_parent", "_rest", "hashes")

    def __init__(self, root: Hashable) -> None:
        self.hashes: list[int] = []
        self._parent = hash(root)
        self._rest: tuple[int, ...] = ()

    def extend(self, tokens: Iterable[int], block_size: int) -> None:
        rest, parent = (*self._rest, *tokens), self._parent
        for end in range(block_size, len(rest) + 1, block_size):
            parent = hash((parent, rest[end - block_size : end]))
            self.hashes.append(parent)
        self._rest, self._parent = rest[len(rest) // block_size * block_size :], parent


class KnownPrefixes:
    """Holds the blocks of prompts and answers, the most recently used last."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._kept, self._found = TokenShare(1.0), TokenShare(0.0)

    def depth(self, chain: BlockChain) -> int:
        hashes = chain.hashes
        return next((depth for depth, hash in enumerate(hashes) if hash not in self._blocks), len(hashes))

    def remember(self, chain: BlockChain, most: int) -> None:
        """Remembers a prompt's blocks, and forgets the least recently used ones beyond `most`. As in the engine's
        cache, the deepest block of a prompt goes first."""
        blocks = self._blocks
        for hash in reversed(chain.hashes):
            blocks[hash] = None
            blocks.move_to_end(hash)
        while len(blocks) > most:
            blocks.popitem(last=False)

    def uncached(self, tokens: int, known: int) -> float:
        """Returns how many of a prompt's tokens are expected to be computed, if `known` of them are remembered."""
        return tokens - self._kept.value * known - self._found.value * (tokens - known)

    def observe(self, tokens: int, known: int, cached: int) -> None:
        """Learns from a prompt of which `known` tokens were remembered and `cached` were reused."""
        self._kept.observe(min(cached, known), known)
        self._found.observe(max(cached - known, 0), tokens - known)
