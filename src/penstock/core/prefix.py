"""Implements the prefix cache: a trie whose node is one full block of tokens, keyed by those tokens.

A node has one KV block for each layer group. Every sequence whose context runs through a node holds that node. A
windowed layer group reads only the last blocks of a context, so a sequence holds a node's block of such a group only
while that block is in its window. Blocks that nobody holds are idle: still useful, free to evict.

Whoever holds a node holds its parents too, and a chain is dropped deepest first, so a node always enters the idle queue
after its children: a node at the front of the queue is a leaf. A node that loses its blocks of full layer groups is
removed. A node that loses a windowed block stays, since blocks after it do not need that block; a prefix that ends
where a windowed block is missing cannot be reused.

Most windowed blocks lie in the middle of a stream, where no other is likely to diverge. They are evicted before
anything else, so that the ends of prompts and streams, and what has been reused, stay reusable for longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from penstock.core import hashing

Key = tuple[int | bytes, ...]  # a block's tokens; the first block's are preceded by the hash of the salt


class PrefixNode:
    """Stands for a full block of tokens that follows the blocks of its parents."""

    __slots__ = ("blocks", "children", "hash", "holders", "kept", "key", "parent", "window_holders")

    def __init__(self, parent: PrefixNode | None, key: Key, blocks: list[int], window_holders: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.blocks = blocks  # by layer group; -1: a windowed block that was evicted
        self.children: dict[Key, PrefixNode] = {}
        self.holders = 1
        self.window_holders = window_holders  # by layer group; counted for windowed groups only
        self.kept = False  # its windowed blocks are worth keeping: streams are likely to begin after them
        self.hash = b""  # its chain hash, where anyone watches

    @property
    def tokens(self) -> tuple[int, ...]:
        """Returns the tokens of this block."""
        return tuple(token for token in self.key if isinstance(token, int))


Idle = PrefixNode | tuple[PrefixNode, int]  # a node's blocks of full groups, or its block of one windowed group


class BlockTrie:
    """Finds, shares and evicts full blocks. `removed` is called with every node that leaves the trie, `changed` with
    every node that loses windowed blocks or has them again."""

    def __init__(
        self,
        block_size: int,
        windows: tuple[int, ...],
        removed: Callable[[PrefixNode], None],
        changed: Callable[[PrefixNode], None],
    ) -> None:
        self.idle_blocks = 0  # blocks that could be evicted
        self._block_size = block_size
        self._windows = windows
        self._windowed = tuple(group for group, window in enumerate(windows) if window)
        self._full = len(windows) - len(self._windowed)
        self._held_once = [1] * len(windows) if self._windowed else []
        self._removed = removed
        self._changed = changed
        self._root = PrefixNode(None, (), [], [])
        self._idle: OrderedDict[Idle, None] = OrderedDict()  # the least recently used comes first
        self._behind: OrderedDict[Idle, None] = OrderedDict()  # idle windowed blocks that are evicted before those

    def match(self, salt: str, tokens: Sequence[int], blocks: int) -> list[PrefixNode]:
        """Returns the longest known chain over the first `blocks` blocks of `tokens`. Changes nothing."""
        chain: list[PrefixNode] = []
        children = self._root.children
        for index in range(blocks):
            node = children.get(self._key(salt, tokens, index))
            if node is None:
                break
            chain.append(node)
            children = node.children
        return chain

    def reusable(self, chain: Sequence[PrefixNode], count: int) -> int:
        """Returns how many of the chain's first `count` blocks a sequence can begin with: the most whose last windows
        are still there."""
        while (hole := self._hole(chain, count)) >= 0:
            count = hole
        return count

    def window_starts(self, position: int) -> list[int]:
        """Returns for each layer group the first block that a token at `position`, or a later one, can see."""
        size = self._block_size
        return [max(position - window + 1, 0) // size if window else 0 for window in self._windows]

    def idle_among(self, chain: Sequence[PrefixNode], starts: Sequence[int]) -> int:
        """Returns how many idle blocks a sequence would take by holding this chain."""
        idle = self._full * sum(node.holders == 0 for node in chain)
        return idle + sum(node.window_holders[g] == 0 for g in self._windowed for node in chain[starts[g] :])

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
        windowed blocks that were evicted since."""
        parent = chain[-1] if chain else self._root
        key = self._key(salt, tokens, len(chain))
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = PrefixNode(parent, key, blocks, self._held_once.copy())
            return node
        self._hold_node(node)
        for group in self._windowed:
            if node.blocks[group] < 0:
                node.blocks[group] = blocks[group]
                node.window_holders[group] = 1
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
        """Lets go of a held chain, given from the root down, and of each layer group's blocks from `starts` on: the
        stream is likely to be continued there."""
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
        """Lets go of a node's block of one windowed layer group."""
        node.window_holders[group] -= 1
        if node.window_holders[group] == 0:
            queue = self._idle if node.kept else self._behind
            queue[node, group] = None
            self.idle_blocks += 1

    def evict(self) -> list[int]:
        """Forgets the least recently used idle blocks and returns them: a leaf's blocks of all groups, or of windowed
        groups alone."""
        idle, _ = (self._behind or self._idle).popitem(last=False)
        if isinstance(idle, PrefixNode):
            return self._remove(idle)
        return self._evict_window(*idle)

    def nodes(self) -> Iterator[PrefixNode]:
        """Yields all nodes."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def idle(self) -> list[Idle]:
        """Returns what is idle, from the next to be evicted on."""
        return [*self._behind, *self._idle]

    def _hole(self, chain: Sequence[PrefixNode], count: int) -> int:
        """Returns a block that is missing in the windows before the end of `count` blocks; -1: none is. No prefix can
        be reused that is shorter and has this block."""
        if not self._windowed:
            return -1
        starts = self.window_starts(count * self._block_size)
        return max(
            (at for g in self._windowed for at in range(starts[g], count) if chain[at].blocks[g] < 0), default=-1
        )

    def _hold_node(self, node: PrefixNode) -> None:
        if node.holders == 0 and self._full:
            del self._idle[node]
            self.idle_blocks -= self._full
        node.holders += 1

    def _hold_window(self, node: PrefixNode, group: int) -> None:
        if node.window_holders[group] == 0:
            self._unqueue(node, group)
            self.idle_blocks -= 1
        node.window_holders[group] += 1

    def _unqueue(self, node: PrefixNode, group: int) -> bool:
        """Takes a windowed block out of the queue that it is in; returns False if it is in none."""
        for queue in (self._idle, self._behind):
            if (node, group) in queue:
                del queue[node, group]
                return True
        return False

    def _rest(self, node: PrefixNode) -> None:
        """Makes a node idle that nobody holds."""
        if self._full:
            self._idle[node] = None
            self.idle_blocks += self._full
        else:
            self._prune(node)

    def _remove(self, node: PrefixNode) -> list[int]:
        """Takes a leaf that nobody holds out of the trie and returns its blocks."""
        assert node.parent is not None
        del node.parent.children[node.key]
        freed = [block for block in node.blocks if block >= 0]
        self.idle_blocks -= len(freed)
        for group in self._windowed:
            self._unqueue(node, group)
        self._removed(node)
        return freed

    def _evict_window(self, node: PrefixNode, group: int) -> list[int]:
        """Frees a node's block of one group and its idle blocks of groups with no larger window: every prefix that
        needs those needs this one too, so they are of no use without it."""
        freed = []
        for other in self._windowed:
            if other == group or (self._windows[other] <= self._windows[group] and self._unqueue(node, other)):
                freed.append(node.blocks[other])
                node.blocks[other] = -1
        self.idle_blocks -= len(freed)
        self._changed(node)
        if not self._full:
            self._prune(node)
        return freed

    def _prune(self, node: PrefixNode | None) -> None:
        """Removes nodes without blocks that nobody needs, from a node upwards. Where all groups are windowed, nodes
        without blocks stay as long as they lead to nodes that have some."""
        while node and node.parent and not node.holders and not node.children and max(node.blocks) < 0:
            self._remove(node)
            node = node.parent

    def _key(self, salt: str, tokens: Sequence[int], index: int) -> Key:
        size = self._block_size
        key = tuple(tokens[index * size : (index + 1) * size])
        return key if index else (hashing.root(salt), *key)
