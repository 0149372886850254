"""Announces blocks that enter and leave the prefix cache, and records them for routers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from penstock.core import hashing
from penstock.core.prefix import PrefixNode
from penstock.types import BlockEvent, BlockRemoved, BlockSnapshot, BlockStored


class BlockWatcher(Protocol):
    """Follows the nodes of the prefix cache. Their chain hashes are known when it is called."""

    def stored(self, node: PrefixNode, parent: bytes) -> None:
        """A node entered the prefix cache below the chain hash `parent`. Its KV is computed."""

    def changed(self, node: PrefixNode) -> None:
        """A node lost blocks of windowed layer groups, or has them again."""

    def removed(self, node: PrefixNode) -> None:
        """A node left the prefix cache. Its blocks may be overwritten from the next step on."""

    def freed(self, block: int) -> None:
        """A private block of a sequence was freed, or a tail was dropped: the block may be overwritten."""

    def state_saved(self, node: PrefixNode, place: int) -> None:
        """The recurrent state at the end of a node is saved in a place of the device, once the current plan is carried
        out. The node's chain hash may come later."""

    def state_lost(self, place: int) -> None:
        """A place of a saved state may be overwritten from the next step on."""


class Watchers:
    """Tells every watcher. Blocks that are copied in are announced once the copies are carried out."""

    def __init__(self, watchers: Iterable[BlockWatcher] = ()) -> None:
        self._watchers = tuple(watchers)
        self._arriving: list[PrefixNode] = []  # nodes that were or will be copied in since the last announcement

    def stored(self, node: PrefixNode) -> None:
        if not self._watchers:
            return
        assert node.parent is not None
        parent = node.parent.hash if node.depth else node.salt_hash
        node.hash = node.hash or hashing.extend(parent, node.tokens)
        node.stored = True
        for watcher in self._watchers:
            watcher.stored(node, parent)

    def arrives(self, node: PrefixNode) -> None:
        if self._watchers:
            self._arriving.append(node)

    def announce_arrivals(self) -> None:
        """Announces the nodes that were copied in: plans are carried out before the next is made and before any is
        committed."""
        for node in self._arriving:
            if node.stored:
                self.changed(node)
            else:
                self.stored(node)
        self._arriving.clear()

    def drop_arrivals(self) -> None:
        self._arriving = [node for node in self._arriving if node.holders]

    def changed(self, node: PrefixNode) -> None:
        for watcher in self._watchers:
            watcher.changed(node)

    def removed(self, node: PrefixNode) -> None:
        if node.stored:
            node.stored = False
            for watcher in self._watchers:
                watcher.removed(node)

    def freed(self, block: int) -> None:
        for watcher in self._watchers:
            watcher.freed(block)

    def state_saved(self, node: PrefixNode, place: int) -> None:
        for watcher in self._watchers:
            watcher.state_saved(node, place)

    def state_lost(self, place: int) -> None:
        for watcher in self._watchers:
            watcher.state_lost(place)


class BlockEvents:
    """Numbers the events of one epoch from 0 and keeps them until they are taken."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._number = 0
        self._events: list[BlockEvent] = []

    def stored(self, node: PrefixNode, parent: bytes) -> None:
        self._events.append(BlockStored(self._number, self.epoch, node.hash, parent, node.tokens))
        self._number += 1

    def changed(self, node: PrefixNode) -> None: ...  # a block stays in the prefix cache without its windows

    def removed(self, node: PrefixNode) -> None:
        self._events.append(BlockRemoved(self._number, self.epoch, node.hash))
        self._number += 1

    def freed(self, block: int) -> None: ...  # the block was not in the prefix cache

    def state_saved(self, node: PrefixNode, place: int) -> None: ...  # routers do not use states

    def state_lost(self, place: int) -> None: ...  # routers do not use states

    def take(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events

    def snapshot(self, nodes: Iterable[PrefixNode]) -> BlockSnapshot:
        """Returns which of all nodes are in the prefix cache, with the number of the event that comes next. Events that
        were not taken yet are in it."""
        return BlockSnapshot(self.epoch, self._number, b"".join(node.hash for node in nodes if node.stored))
