"""The prefix cache: a trie whose node is one full block, keyed by that block's tokens.

A node is held by every sequence whose context runs through it. A node nobody holds is idle: still useful, free to
evict. Whoever holds a node holds its parents too, and a chain is dropped deepest first, so a node always enters
the idle queue after its children: the front of the queue is the least recently used node and is a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

Key = tuple[int | str, ...]  # a block's tokens; the first block's are preceded by the salt


class Node:
    __slots__ = ("block", "children", "holders", "key", "parent")

    def __init__(self, parent: Node | None, key: Key, block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[Key, Node] = {}
        self.holders = 0


class BlockTrie:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._root = Node(None, (), -1)
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """How many blocks could be evicted."""
        return len(self._idle)

    def match(self, salt: str, tokens: Sequence[int], blocks: int) -> list[Node]:
        """The longest known chain over the first `blocks` blocks of `tokens`. Changes nothing."""
        chain: list[Node] = []
        children = self._root.children
        for index in range(blocks):
            node = children.get(self._key(salt, tokens, index))
            if node is None:
                break
            chain.append(node)
            children = node.children
        return chain

    def hold(self, chain: Sequence[Node]) -> None:
        for node in chain:
            if node.holders == 0:
                del self._idle[node]
            node.holders += 1

    def enter(self, chain: Sequence[Node], salt: str, tokens: Sequence[int], block: int) -> Node:
        """Holds the node one block below `chain`; `block` backs it if nobody had computed it before."""
        parent = chain[-1] if chain else self._root
        key = self._key(salt, tokens, len(chain))
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, block)
            node.holders = 1
        else:
            self.hold((node,))
        return node

    def drop(self, chain: Sequence[Node]) -> None:
        """Lets go of a held chain, given from the root down."""
        for node in reversed(chain):
            node.holders -= 1
            if node.holders == 0:
                self._idle[node] = None

    def evict(self) -> Node:
        """Forgets the least recently used idle leaf, whose block is free then."""
        node, _ = self._idle.popitem(last=False)
        assert node.parent is not None
        del node.parent.children[node.key]
        return node

    def nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def idle_nodes(self) -> list[Node]:
        """From the next to be evicted on."""
        return list(self._idle)

    def _key(self, salt: str, tokens: Sequence[int], index: int) -> Key:
        size = self._block_size
        key = tuple(tokens[index * size : (index + 1) * size])
        return key if index else (salt, *key)
