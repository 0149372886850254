"""Puts blocks into the prefix cache that were computed elsewhere: read from disk, or pulled from another engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.core.kvcache import KvCache
from penstock.core.prefix import block_key
from penstock.core.tiers import DISK


def attach(
    cache: KvCache,
    salt: str,
    tokens: Sequence[int],
    first: int,
    places: Sequence[Sequence[int]],
    tier: str = DISK,
    state: int = -1,
) -> int:
    """Puts blocks of a prompt, from block `first` on, into the prefix cache. Their KV is in reserved `places`
    (HostTier.reserve), one for each layer group (-1: none, for windowed groups). Blocks before the first must be known.
    `state` is the place of the state at the last block's end. Unused places are freed; returns the number of blocks
    that are used."""
    chain, end = cache.trie.match(salt, tokens, first), first + len(places)
    if len(chain) < first or not places:
        cache.host.give_back(place for each in places for place in each if place >= 0)
        cache.states.unreserve(state)
        return 0
    count = cache.trie.attach(chain, salt, tokens, places, tier)
    whole = len(cache.trie.match(salt, tokens, end)) == end  # nothing of it was pruned
    cache.states.attach(chain[-1] if whole else None, state)
    return count


def take_in(
    cache: KvCache,
    salt: str,
    tokens: Sequence[int],
    first: int,
    wanted: Sequence[Sequence[bool]],
    fill: Callable[[list[list[int]]], int],
) -> int:
    """Puts blocks of a prompt, from block `first` on, into the prefix cache: for each, a block of the device for every
    `wanted` layer group. `fill` writes to these blocks (-1: not wanted) and returns how many of the prompt's blocks are
    valid. Returns the number of used blocks: 0 if the blocks before `first` are not on the device, if one of the new
    ones has come meanwhile, or if there is too little room."""
    chain = cache.trie.match(salt, tokens, first + len(wanted))
    if len(chain) != first or not all(map(cache.trie.on_device, chain)):
        return 0
    cache.trie.hold(chain, [first] * cache.groups)  # what makes room must not take these
    blocks: list[list[int]] = []
    if sum(map(sum, wanted)) <= cache.available:
        blocks = [[cache.take() if want else -1 for want in groups] for groups in wanted]
    right = fill(blocks) if blocks else 0
    for each in blocks[right:]:
        for block in each:
            if block >= 0:
                cache.give(block)
    for index, each in enumerate(blocks[:right], first):
        node = cache.trie.insert(chain[-1] if chain else None, block_key(salt, tokens, index, cache.block_size), each)
        chain.append(node)
        cache.sources.add(node)
        cache.watchers.stored(node)
    groups = zip(*wanted, strict=True)
    cache.trie.drop(chain, [first + (*group, True).index(True) for group in groups])
    return right
