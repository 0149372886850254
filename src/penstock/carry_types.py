"""Defines how engines offer KV blocks to each other, and what is counted of that. `types` has all of it."""

from __future__ import annotations

from typing import NamedTuple


class BlockOffer(NamedTuple):
    """Lets another engine read blocks of one prompt, once and within a lease. Whoever knows its id may read them."""

    id: bytes  # 16 random bytes
    epoch: int  # of the engine that offers
    identity: bytes  # a digest of all that the contents of blocks depend on
    addresses: tuple[str, ...]  # where the blocks can be read, the fastest first
    first: int  # block of the prompt
    hashes: tuple[bytes, ...]  # chain hashes, of that block and those after it
    present: tuple[int, ...]  # for each block, a bit for each layer group whose block is there
    seconds: float  # that the lease lasts


class Offered(NamedTuple):
    """Answers an Offer; without blocks, there was nothing to offer or no room to keep it."""

    seq: int  # the message's id
    offer: BlockOffer | None = None


Reasons = tuple[tuple[str, int], ...]  # how often each occurred


class PeerCounts(NamedTuple):
    """Counts KV blocks that engines read from each other."""

    pulls: int = 0  # requests that blocks were read for
    pulled_blocks: int = 0
    pulled_tokens: int = 0
    pull_seconds: float = 0.0  # from the first byte asked for to the last block
    failures: Reasons = ()  # pulls of which something had to be computed after all
    offers: int = 0
    offered_blocks: int = 0
    read_blocks: int = 0  # by others, of those offered
    refusals: Reasons = ()  # of others who wanted to read
    leased_blocks: int = 0  # now
    carriers: Reasons = ()  # pulls, by what carried the blocks: shm, tcp, nixl
    passed_over: Reasons = ()  # carriers that could not be used, so that the next one was tried

    def plus(self, other: PeerCounts) -> PeerCounts:
        """Returns the counts of both."""
        return PeerCounts(
            self.pulls + other.pulls,
            self.pulled_blocks + other.pulled_blocks,
            self.pulled_tokens + other.pulled_tokens,
            self.pull_seconds + other.pull_seconds,
            _added(self.failures, other.failures),
            self.offers + other.offers,
            self.offered_blocks + other.offered_blocks,
            self.read_blocks + other.read_blocks,
            _added(self.refusals, other.refusals),
            self.leased_blocks + other.leased_blocks,
            _added(self.carriers, other.carriers),
            _added(self.passed_over, other.passed_over),
        )


def _added(mine: Reasons, more: Reasons) -> Reasons:
    counts = dict(mine)
    for reason, count in more:
        counts[reason] = counts.get(reason, 0) + count
    return tuple(sorted(counts.items()))
