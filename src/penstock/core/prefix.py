"""Implements the prefix cache: a trie whose node is one full block of tokens, keyed by those tokens.

A node has one KV block for each layer group. Every sequence whose context runs through a node holds that node. A
windowed layer group reads only the last blocks of a context, so a sequence holds a node's block of such a group only
while that block is in its window. Blocks that nobody holds are idle: still useful, free to evict.

A sequence that holds a node holds its parents too, and a chain is dropped deepest first, so a node always enters the
idle queue after its children: a node at the front of the queue is a leaf. A node that loses its blocks of full layer
groups is removed. A node that loses a windowed block stays, since blocks after it do not need that block; a prefix that
ends where a windowed block is missing cannot be reused.

Most windowed blocks lie in the middle of a stream, where no other is likely to diverge. They are evicted before
anything else, so that the ends of prompts and streams, and reused blocks, stay for longer.

Blocks that leave the device may go to host memory (tiers.py): their node then has places there and stays, below nodes
that have their blocks of full layer groups on the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.core import hashing

if TYPE_CHECKING:
    from penstock.core.tiers import HostTier

Key = tuple[int | bytes, ...]  # a block's tokens; the first block's are preceded by the hash of the salt


class PrefixNode:
    """Stands for a full block of tokens that follows the blocks of its parents."""

    __slots__ = (
        "blocks",
        "children",
        "depth",
        "hash",
        "holders",
        "kept",
        "key",
        "parent",
        "places",
        "stored",
        "tier",
        "window_holders",
    )

    def __init__(self, parent: PrefixNode | None, key: Key, blocks: list[int], window_holders: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.depth: int = parent.depth + 1 if parent else -1  # blocks before it
        self.blocks = blocks  # an id for each layer group; -1: not on the device
        self.places = [-1] * len(blocks)  # in host memory, by layer group; -1: none
        self.tier = ""  # where the places' contents came from
        self.children: dict[Key, PrefixNode] = {}
        self.holders = 1
        self.window_holders = window_holders  # a count for each layer group; windowed groups only
        self.kept = False  # its windowed blocks are worth keeping: streams are likely to begin after them
        self.hash = b""  # its chain hash, if it is known
        self.stored = False  # watchers know that it is there

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for token in self.key if isinstance(token, int))

    @property
    def salt_hash(self) -> bytes:
        return b"".join(part for part in self.key if isinstance(part, bytes))


Idle = PrefixNode | tuple[PrefixNode, int]  # a node's blocks of full groups, or its block of one windowed group


class IdleQueue:
    """Orders idle blocks for eviction: the least recently used ones go first, and `early` ones before all others."""

    __slots__ = ("_blocks", "_early")

    def __init__(self) -> None:
        self._blocks: OrderedDict[Idle, None] = OrderedDict()
        self._early: OrderedDict[Idle, None] = OrderedDict()

    def __iter__(self) -> Iterator[Idle]:
        yield from self._early
        yield from self._blocks

    def add(self, idle: Idle, early: bool = False) -> None:
        (self._early if early else self._blocks)[idle] = None

    def discard(self, idle: Idle) -> bool:
        for queue in (self._blocks, self._early):
            if idle in queue:
                del queue[idle]
                return True
        return False

    def pop(self) -> Idle:
        return (self._early or self._blocks).popitem(last=False)[0]


class BlockTrie:
    """Finds, shares and evicts full blocks. `host` may keep evicted blocks. `removed` is called with every node that
    leaves the device, before it loses its blocks, `changed` with every node that loses windowed blocks or has them
    again, and `gone` with every node that leaves the trie."""

    def __init__(
        self,
        block_size: int,
        windows: tuple[int, ...],
        host: HostTier,
        removed: Callable[[PrefixNode], None],
        changed: Callable[[PrefixNode], None],
        gone: Callable[[PrefixNode], None],
    ) -> None:
        self.idle_blocks = 0  # blocks that could be evicted
        self._block_size = block_size
        self._windows = windows
        self._host = host
        self._windowed = tuple(group for group, window in enumerate(windows) if window)
        self._full = len(windows) - len(self._windowed)
        self._first_full = windows.index(0) if self._full else -1  # it stands for all of them
        self._held_once = [1] * len(windows) if self._windowed else []
        self._removed = removed
        self._changed = changed
        self._gone = gone
        self._root = PrefixNode(None, (), [], [])
        self.idle = IdleQueue()

    def match(self, salt: str, tokens: Sequence[int], blocks: int) -> list[PrefixNode]:
        """Returns the longest known chain over the first `blocks` blocks of `tokens`. Changes nothing."""
        chain: list[PrefixNode] = []
        children = self._root.children
        for index in range(blocks):
            node = children.get(block_key(salt, tokens, index, self._block_size))
            if node is None:
                break
            chain.append(node)
            children = node.children
        return chain

    def reusable(self, chain: Sequence[PrefixNode], count: int, host: bool = True) -> int:
        """Returns how many of the chain's first `count` blocks a sequence can begin with: the longest prefix whose last
        windows are still there. Without `host`, only blocks on the device count."""
        if self._full and not host:
            count = next((at for at in range(count) if not self.on_device(chain[at])), count)
        while (hole := self._hole(chain, count, host)) >= 0:
            count = hole
        return count

    def on_device(self, node: PrefixNode) -> bool:
        """Returns whether a node has its blocks of full layer groups; True for a model without full groups."""
        return not self._full or node.blocks[self._first_full] >= 0

    def absent(self, chain: Sequence[PrefixNode], starts: Sequence[int]) -> list[Idle]:
        nodes: list[Idle] = [node for node in chain if not self.on_device(node)]
        return nodes + [(node, g) for g in self._windowed for node in chain[starts[g] :] if node.blocks[g] < 0]

    def window_starts(self, position: int) -> list[int]:
        """Returns for each layer group the first block that a token at `position`, or a later one, can see."""
        size = self._block_size
        return [max(position - window + 1, 0) // size if window else 0 for window in self._windows]

    def idle_among(self, chain: Sequence[PrefixNode], starts: Sequence[int]) -> int:
        idle = self._full * sum(node.holders == 0 and self.on_device(node) for node in chain)
        windows = ((node, g) for g in self._windowed for node in chain[starts[g] :])
        return idle + sum(node.window_holders[g] == 0 and node.blocks[g] >= 0 for node, g in windows)

    def hold(self, chain: Sequence[PrefixNode], starts: Sequence[int]) -> None:
        """Holds a chain of nodes, and of each layer group the blocks from `starts` on, which have proved useful."""
        for node in chain:
            self._hold_node(node)
        for group in self._windowed:
            for node in chain[starts[group] :]:
                self._hold_window(node, group)
                node.kept = True

    def publish(self, chain: Sequence[PrefixNode], salt: str, tokens: Sequence[int], blocks: list[int]) -> PrefixNode:
        """Holds the node one block below `chain`. `blocks` back it if nobody had computed it before, and fill in
        blocks that have left the device since."""
        end = (len(chain) + 1) * self._block_size
        assert len(tokens) >= end, f"a block that ends at {end} is not full: its sequence has {len(tokens)} tokens"
        parent = chain[-1] if chain else self._root
        key = block_key(salt, tokens, len(chain), self._block_size)
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = PrefixNode(parent, key, blocks, self._held_once.copy())
            return node
        self._hold_node(node)
        if not self.on_device(node):
            node.blocks = [-1 if window else block for block, window in zip(blocks, self._windows, strict=True)]
            self._host.duplicated(node)
        for group in self._windowed:
            if node.blocks[group] < 0:
                node.blocks[group] = blocks[group]
                node.window_holders[group] = 1
                self._host.duplicated((node, group))
                self._changed(node)
            else:
                self._hold_window(node, group)
        return node

    def insert(self, parent: PrefixNode | None, key: Key, blocks: list[int]) -> PrefixNode:
        """Holds a new node below another, or below the root. Its `blocks` have been computed; windowed ones may be
        missing."""
        above = parent or self._root
        holders = [int(block >= 0) for block in blocks] if self._windowed else []
        node = above.children[key] = PrefixNode(above, key, blocks, holders)
        return node

    def drop(self, chain: Sequence[PrefixNode], starts: Sequence[int]) -> None:
        """Releases a held chain, given from the root down, and each layer group's blocks from `starts` on, where the
        stream is likely to continue."""
        for index in range(len(chain) - 1, -1, -1):
            node = chain[index]
            for group in self._windowed:
                if index >= starts[group]:
                    node.kept = True
                    self.drop_window(node, group)
            node.holders -= 1
            if node.holders == 0:
                self._rest(node)

    def drop_window(self, node: PrefixNode, group: int) -> None:
        node.window_holders[group] -= 1
        if node.window_holders[group] == 0:
            self.idle.add((node, group), early=not node.kept)
            self.idle_blocks += 1

    def evict(self, pays: Callable[[PrefixNode, int], bool]) -> list[int]:
        """Takes the least recently used idle blocks from the device and returns them: a leaf's blocks of all groups, or
        of one windowed group. They go to the host if that `pays` for this number of a node's blocks."""
        idle = self.idle.pop()
        if isinstance(idle, PrefixNode):
            return self._evict_node(idle, pays)
        return self._evict_window(*idle, pays)

    def attach(
        self, chain: list[PrefixNode], salt: str, tokens: Sequence[int], places: Iterable[Sequence[int]], tier: str
    ) -> int:
        """Backs missing nodes below `chain` with reserved places, one for each layer group; returns how many nodes got
        any."""
        count = 0
        for given in places:
            parent = chain[-1] if chain else self._root
            key = block_key(salt, tokens, len(chain), self._block_size)
            node = parent.children.get(key)
            if node is None:
                node = parent.children[key] = PrefixNode(parent, key, [-1] * len(given), [0] * len(self._held_once))
                node.holders = 0
            chain.append(node)
            count += self._fill(node, given, tier)
        for node in reversed(chain):
            for group in self._windowed:
                self._host.touch((node, group))
            self._host.touch(node)
        self.prune(chain[-1])
        return count

    def nodes(self) -> Iterator[PrefixNode]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _hole(self, chain: Sequence[PrefixNode], count: int, host: bool) -> int:
        """Returns a block that is missing in the windows before the end of `count` blocks; -1: none is. No prefix can
        be reused that is shorter and has this block."""
        if not self._windowed:
            return -1
        starts = self.window_starts(count * self._block_size)
        windows = ((at, chain[at], g) for g in self._windowed for at in range(starts[g], count))
        gone = (at for at, node, g in windows if node.blocks[g] < 0 and not (host and node.places[g] >= 0))
        return max(gone, default=-1)

    def _fill(self, node: PrefixNode, given: Sequence[int], tier: str) -> bool:
        entries: list[tuple[Idle, int]] = [((node, g), g) for g in self._windowed]
        if self._full:
            entries.append((node, self._first_full))
        used = set[int]()
        for entry, group in entries:
            if given[group] >= 0 and node.blocks[group] < 0 and node.places[group] < 0:
                self._host.fill(entry, given, tier)
                used.update(node.places)
        self._host.give_back(place for place in given if place >= 0 and place not in used)
        return bool(used)

    def _hold_node(self, node: PrefixNode) -> None:
        if node.holders == 0 and self._full and self.on_device(node):
            self.idle.discard(node)
            self.idle_blocks -= self._full
        node.holders += 1

    def _hold_window(self, node: PrefixNode, group: int) -> None:
        if node.window_holders[group] == 0 and self.idle.discard((node, group)):
            self.idle_blocks -= 1
        node.window_holders[group] += 1

    def _rest(self, node: PrefixNode) -> None:
        if self._full:
            self.idle.add(node)
            self.idle_blocks += self._full
        else:
            self.prune(node)

    def _evict_node(self, node: PrefixNode, pays: Callable[[PrefixNode, int], bool]) -> list[int]:
        freed = [block for block in node.blocks if block >= 0]
        self.idle_blocks -= len(freed)
        for group in self._windowed:
            if self.idle.discard((node, group)):
                self._host.keep((node, group), node.kept and pays(node, 1))
        kept = self._host.total > 0 and self._host.keep(node, pays(node, self._full))
        self._removed(node)
        node.blocks = [-1] * len(node.blocks)
        if not kept:
            self._cut(node)
        return freed

    def _evict_window(self, node: PrefixNode, group: int, pays: Callable[[PrefixNode, int], bool]) -> list[int]:
        """Frees a node's block of one group. If the host does not keep it, idle blocks of groups with no larger window
        are freed too: every prefix that needs those needs this one too, so they are of no use without it."""
        leaving = [group]
        if not self._host.keep((node, group), node.kept and pays(node, 1)):
            smaller = (g for g in self._windowed if g != group and self._windows[g] <= self._windows[group])
            leaving += [g for g in smaller if self.idle.discard((node, g))]
            for g in leaving[1:]:
                self._host.keep((node, g), False)
        freed = [node.blocks[g] for g in leaving]
        for g in leaving:
            node.blocks[g] = -1
        self.idle_blocks -= len(freed)
        self._changed(node)
        self.prune(node)
        return freed

    def prune(self, node: PrefixNode) -> None:
        """Removes nodes that nobody needs and that have nothing left, from a node upwards. Where all groups are
        windowed, such nodes stay as long as they lead to nodes that have some."""
        while node.parent and not node.holders and not node.children and not self._has_any(node):
            parent = node.parent
            self._cut(node)
            node = parent

    def _has_any(self, node: PrefixNode) -> bool:
        if self._full:
            return node.blocks[self._first_full] >= 0 or node.places[self._first_full] >= 0
        return max(node.blocks) >= 0 or max(node.places) >= 0

    def _cut(self, node: PrefixNode) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        stack = [node]
        while stack:
            node = stack.pop()
            self._host.drop(node)
            self._gone(node)
            if not self._full:  # otherwise `removed` was called when the node left the device
                self._removed(node)
            stack.extend(node.children.values())


def block_key(salt: str, tokens: Sequence[int], index: int, size: int) -> Key:
    key = tuple(tokens[index * size : (index + 1) * size])
    return key if index else (hashing.root(salt), *key)
