"""Puts blocks that another engine has computed into a prefix cache that is empty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.core import hashing
from penstock.core.free_blocks import Parent, Tail
from penstock.core.kvcache import KvCache
from penstock.core.prefix import Key, PrefixNode
from penstock.types import Limits


class StoredNode(NamedTuple):
    """Describes a node of a prefix cache, as a BlockWatcher saw it."""

    number: int  # is higher for nodes that were stored later
    hash: bytes
    parent: bytes  # the chain hash of the block before, or the root of its salt
    first: bool  # no block comes before it
    tokens: tuple[int, ...]
    blocks: list[int]  # an id for each layer group; -1: missing


class StoredTail(NamedTuple):
    """Describes the tokens that a sequence had computed of a block that was not full yet."""

    parent: bytes  # as in StoredNode
    first: bool
    tokens: tuple[int, ...]
    blocks: list[int]


class StoredState(NamedTuple):
    """Says which place has the recurrent state at the end of a node."""

    number: int  # is higher for states that were saved later
    hash: bytes  # the node's
    place: int


def adopt(
    cache: KvCache,
    limits: Limits,
    stored: Iterable[StoredNode],
    tails: Iterable[StoredTail] = (),
    states: Iterable[StoredState] = (),
) -> int:
    """Puts nodes into the prefix cache, as idle ones, and returns their number of blocks. The nodes stored first are
    evicted first. A node is left out if it lacks a block, if its hash does not match its tokens, or if its parent is
    left out. Tails and states behind adopted nodes are kept. Call it before the cache is used."""
    nodes: dict[bytes, PrefixNode] = {}
    adopted: list[StoredNode] = []
    used: set[int] = set()
    for found in _from_the_root_down(stored):
        if found.hash in nodes or not (found.first or found.parent in nodes) or not _is_sound(found, limits, used):
            continue
        key: Key = (found.parent, *found.tokens) if found.first else found.tokens
        node = cache.trie.insert(None if found.first else nodes[found.parent], key, found.blocks)
        node.hash = found.hash
        nodes[found.hash] = node
        adopted.append(found)
        used.update(block for block in found.blocks if block >= 0)
    cache.pool.remove(used)
    for found in adopted:
        cache.watchers.stored(nodes[found.hash])
    for found in _in_order_of_eviction(adopted):
        cache.trie.drop([nodes[found.hash]], [int(block < 0) for block in found.blocks])
    count = len(used)
    cache.keep_tails(_sound_tails(tails, nodes, limits, used))
    for state in sorted(states):
        if state.hash in nodes:
            cache.states.adopt(nodes[state.hash], state.place)
    return count


def _sound_tails(
    tails: Iterable[StoredTail], nodes: dict[bytes, PrefixNode], limits: Limits, used: set[int]
) -> Iterator[Tail]:
    for tail in tails:
        parent: Parent | None = tail.parent if tail.first else nodes.get(tail.parent)
        if parent is not None and 0 < len(tail.tokens) < limits.block_size and _are_free(tail.blocks, limits, used):
            used.update(tail.blocks)
            yield Tail(parent, tail.tokens, tail.blocks)


def _from_the_root_down(stored: Iterable[StoredNode]) -> Iterator[StoredNode]:
    below: defaultdict[bytes, list[StoredNode]] = defaultdict(list)
    stack: list[StoredNode] = []
    for node in stored:
        (stack if node.first else below[node.parent]).append(node)
    while stack:
        node = stack.pop()
        yield node
        stack += below.pop(node.hash, [])


def _is_sound(found: StoredNode, limits: Limits, used: set[int]) -> bool:
    here = [block for block in found.blocks if block >= 0]
    if not here or not _are_free(here, limits, used):
        return False
    if any(block < 0 and not window for block, window in zip(found.blocks, limits.windows, strict=True)):
        return False
    return len(found.tokens) == limits.block_size and found.hash == hashing.extend(found.parent, found.tokens)


def _are_free(blocks: list[int], limits: Limits, used: set[int]) -> bool:
    return len({*blocks} - used) == len(blocks) and min(blocks) >= 0 and max(blocks) < limits.num_blocks


def _in_order_of_eviction(adopted: list[StoredNode]) -> list[StoredNode]:
    """Returns nodes, given from the root down, as they are to be evicted: a node is as recent as the last that was
    stored below it, and goes after it."""
    recent = {node.hash: node.number for node in adopted}
    deepest_first = adopted[::-1]
    for node in deepest_first:
        if not node.first:
            recent[node.parent] = max(recent[node.parent], recent[node.hash])
    return sorted(deepest_first, key=lambda node: recent[node.hash])  # equal ones keep their order
