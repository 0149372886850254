"""Writes the blocks of prompts and answers to disk in the background."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.core import hashing
from penstock.core.kvcache import KvCache
from penstock.core.prefix import PrefixNode
from penstock.engine.host_blocks import HostBlocks, HostStateCopies
from penstock.engine.kv_disk.disk_reads import RequestOnDisk
from penstock.engine.kv_disk.segment import pack
from penstock.engine.kv_disk.store import SegmentStore
from penstock.engine.kv_disk.writing import BlockToWrite, Writer

SHARE = 0.005  # share of the time spent on writing while requests run
MOST_CREDIT = 0.005  # seconds of that time that are saved up
IN_IDLE = 4  # blocks that are prepared at once while nothing runs
MOST_PENDING = 16384  # blocks that wait until there is time
CLOSING = 1.0  # seconds for the last blocks at the end


class PendingBlock(NamedTuple):
    """Is a block that is to be written once there is time."""

    node: PrefixNode
    hash: bytes
    parent: bytes
    state: bool  # the state at its end is to be written too, if it is still there


class DiskWrites:
    """Writes blocks of the `cache` to the `store`, prompts before answers. Their contents are on the device or in the
    `host`."""

    def __init__(
        self,
        store: SegmentStore,
        cache: KvCache,
        host: HostBlocks,
        states: HostStateCopies | None,
        windows: Sequence[int],
    ) -> None:
        self._store = store
        self._cache = cache
        self._host = host
        self._states = states
        self._windows = windows
        self._writer = Writer(store)
        self._prompts: dict[bytes, PendingBlock] = {}
        self._answers: dict[bytes, PendingBlock] = {}  # are written while nothing runs
        self._credit = self._cost = 0.0  # seconds: that may be spent, that a block takes
        self._last = time.perf_counter()

    def keep(self, disk: RequestOnDisk, prompt: Sequence[int]) -> None:
        """Queues the full blocks of a prompt for writing, and the following ones in the prefix cache: its answers."""
        nodes = self._cache.trie.match(disk.salt, prompt, len(disk.hashes))
        parents, ending = [hashing.root(disk.salt), *disk.hashes], self._cache.states.deepest(nodes, len(nodes))
        for node, hash, parent in zip(nodes, disk.hashes, parents, strict=False):
            parts = len(node.children) > 1 or node.depth == ending - 1
            self._pend(self._prompts, PendingBlock(node, hash, parent, parts))
        if nodes and len(nodes) == len(disk.hashes):
            for block in _below(nodes[-1], disk.hashes[-1]):
                self._pend(self._answers, block)

    def write_between_steps(self) -> None:
        now = time.perf_counter()
        self._credit = min(self._credit + SHARE * (now - self._last), MOST_CREDIT)
        self._last = now
        if self._prompts and self._credit >= self._cost and not self._writer.full:
            self._write_next(self._prompts)
            cost = time.perf_counter() - now
            self._credit -= cost
            self._cost = min(cost, MOST_CREDIT)

    def write_some(self) -> bool:
        """Writes a few blocks; returns False when none are left."""
        for pending in (self._prompts, self._answers):
            for _ in range(IN_IDLE):
                if pending and not self._writer.full:
                    self._write_next(pending)
        if self._writer.full:
            time.sleep(0.001)
        return bool(self._prompts or self._answers)

    def drop(self) -> None:
        self._prompts.clear()
        self._answers.clear()
        self._writer.drop()

    def close(self) -> None:
        until = time.perf_counter() + CLOSING
        while time.perf_counter() < until and self.write_some():
            pass
        self._writer.close()

    def _pend(self, pending: dict[bytes, PendingBlock], block: PendingBlock) -> None:
        more = block.hash not in self._store or (block.state and self._has_new_state(block))
        if more and len(pending) < MOST_PENDING:
            pending[block.hash] = block if block.state else pending.get(block.hash, block)

    def _has_new_state(self, block: PendingBlock) -> bool:
        return max(self._cache.states.where(block.node)) >= 0 and not self._store.has_state(block.hash)

    def _write_next(self, pending: dict[bytes, PendingBlock]) -> None:
        while pending:
            block = pending.pop(next(iter(pending)))
            node, hash, parent, _ = block
            contents = [self._host.contents(node, group) for group in range(len(self._windows))]
            gone = any(data is None and not window for data, window in zip(contents, self._windows, strict=True))
            state = block.state and self._has_new_state(block)
            if self._states is not None:
                contents.append(self._states.copy_of(*self._cache.states.where(node)) if state else None)
            if not gone and (state or hash not in self._store):
                self._writer.write(BlockToWrite(hash, parent, pack(node.tokens), tuple(contents)))
                return


def _below(node: PrefixNode, hash: bytes) -> Iterator[PendingBlock]:
    stack = [(node, hash)]
    while stack:
        node, hash = stack.pop()
        for child in node.children.values():
            own = hashing.extend(hash, child.tokens)
            yield PendingBlock(child, own, hash, True)
            stack.append((child, own))
