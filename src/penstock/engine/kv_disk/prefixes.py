"""Keeps prompts on disk for an engine: what was computed is written behind, and what is known is read before a request
runs.

Blocks go from disk to reserved places of the host tier, where the prefix cache finds them (core/tiers.py). The
scheduler knows nothing of disks.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.backend.base import Backend, BlockMemory
from penstock.core import hashing
from penstock.core.kvcache import KvCache
from penstock.core.prefix import PrefixNode
from penstock.core.step_cost import CostModel, PromptCost
from penstock.core.tiers import DISK
from penstock.engine.chain_loads import ChainLoad, ChainLoads
from penstock.engine.feature import End, Feature
from penstock.engine.host_blocks import HostBlocks, HostMemory, HostStateCopies
from penstock.engine.kv_disk.loading import Loader, Loading
from penstock.engine.kv_disk.rates import Rates, read_rates, write_rates
from penstock.engine.kv_disk.store import SegmentStore, StoredBlock
from penstock.engine.kv_disk.writing import BlockToWrite, Writer
from penstock.engine.record import RequestRecord
from penstock.engine.waiting import Need
from penstock.errors import NotFinite
from penstock.types import DiskCounts, Failed, Finished, Limits

SHARE = 0.005  # of the time, while requests run, that is spent on blocks that are to be written
MOST_CREDIT = 0.005  # seconds of that time that are saved up
IN_IDLE = 4  # blocks that are prepared at once while nothing runs
MOST_PENDING = 16384  # blocks that wait until there is time
CLOSING = 1.0  # seconds for what is left at the end
UNMEASURED = Rates(token=1 / 2000)  # is taken for true before any server has measured
TOUCHED = 48 << 20  # bytes of each tier's memory that are touched at the start
AHEAD = 192 << 20  # bytes of the device's memory that are touched in idle before they are needed
SAVE = 60.0  # seconds between two notes of the rates


class RequestOnDisk:
    """Belongs to one request: what its prompt is called on disk, and what is being read of it."""

    __slots__ = ("hashes", "key", "load", "salt")

    def __init__(self, salt: str, hashes: list[bytes]) -> None:
        self.salt = salt
        self.hashes = hashes  # of the full blocks of its prompt
        self.load: ChainLoad | None = None
        self.key = b""  # of what is being read: the chain hash of its first block


class PendingBlock(NamedTuple):
    """Is a block that is to be written once there is time."""

    node: PrefixNode
    hash: bytes
    parent: bytes
    state: bool  # the state at its end is to be written too, if it is still there


class DiskPrefixes(Feature):
    """Has prompts that a `store` knows read into places of the `host`, where `cache` finds them, if `prompts` take
    longer to compute, and has new ones written that `memory` or the host holds."""

    def __init__(
        self,
        store: SegmentStore,
        cache: KvCache,
        host: HostBlocks,
        states: HostStateCopies | None,
        memory: BlockMemory,
        limits: Limits,
        prompts: PromptCost,
        chain: hashing.Chain,
    ) -> None:
        self._store = store
        self._cache = cache
        self._host = host
        self._states = states
        self._memory = memory
        self._windows = limits.windows
        self._longest = limits.max_len
        self._size = limits.block_size
        self._prompt_cost = prompts
        self._chain = chain
        self._rates = read_rates(store.folder)  # by the last server
        self._loader = Loader(store, self._rates.read)
        self._writer = Writer(store)
        self._chains = ChainLoads(cache, host, states, limits)
        self._loads: dict[bytes, ChainLoad] = {}  # by the chain hash of their first block
        self._prompts: dict[bytes, PendingBlock] = {}
        self._answers: dict[bytes, PendingBlock] = {}  # are written while nothing runs
        self._credit = self._cost = 0.0  # seconds: that may be spent, that a block takes
        self._last = time.perf_counter()
        self._saved = self._last  # when the rates were
        self._read = self._given_up = 0
        self._touched = bytearray(limits.num_blocks)
        self._prepare()

    def _prepare(self) -> None:
        """Gets ready for the first prompt after a restart: touches memory of places, none of which is in use yet, and
        of blocks, and starts threads."""
        if len(self._store):
            count = min(len(self._store), TOUCHED // self._host.block_bytes)
            for place in range(min(count, self._host.places)):
                self._host.fill(place)[:] = bytes(self._host.block_bytes)
            self._touch(count)
            self._loader.start()

    def _touch(self, most: int) -> bool:
        """Touches at most so many of the free blocks that prompts are copied into next: the system gives memory slowly,
        for the blocks of a prompt longer than they take to be read. Returns whether there were any."""
        ahead = self._cache.pool.upcoming(min(len(self._store), AHEAD // self._host.block_bytes))
        kept = self._cache.tails.blocks
        untouched = [block for block in ahead if not self._touched[block] and block not in kept][:most]
        self._memory.touch_blocks(untouched)
        for block in untouched:
            self._touched[block] = 1
        return bool(untouched)

    # -- reading -------------------------------------------------------------------------------------------------

    def reads(self, record: RequestRecord) -> Sequence[Need]:
        request, weights = record.request, self.engine.weights
        fits = self._size <= len(request.prompt) < self._longest
        if record.disk is not None or not (request.durable and fits) or weights.updates or record.pools_from_start:
            return []
        salt = record.salt(weights)
        record.disk = disk = RequestOnDisk(salt, self._chain(salt, request.prompt, self._size))
        if request.sampling.prompt_logprobs is None:
            disk.load = self._load(disk, request.prompt)
        return [] if disk.load is None else [Need("kv", disk.load.loading, lambda: self._deliver(disk))]

    def _load(self, disk: RequestOnDisk, prompt: Sequence[int]) -> ChainLoad | None:
        """Begins to read what the prefix cache has not of a prompt, if that is known and pays. The last token is always
        computed."""
        self._chains.collect()
        end = (len(prompt) - 1) // self._size
        known = self._cache.trie.match(disk.salt, prompt, end)
        first = self._cache.states.deepest(known, len(known))
        if first == end or disk.hashes[first] not in self._store:
            return None
        disk.key = disk.hashes[first]
        if (load := self._loads.get(disk.key)) is not None:
            load.loading.waiters += 1
            return load
        parent = disk.hashes[first - 1] if first else hashing.root(disk.salt)
        tokens = [pack(prompt[at * self._size : (at + 1) * self._size]) for at in range(first, end)]
        found = self._store.find(parent, disk.hashes[first:end], tokens)
        found = found[: self._chains.reusable([block.record.present for block in found], first)]
        if not found or not self._pays(found, first):
            return None
        for node in reversed(known):
            self._cache.host.touch(node)
        return self._begin(found, disk, prompt, first)

    def _begin(
        self, found: list[StoredBlock], disk: RequestOnDisk, prompt: Sequence[int], first: int
    ) -> ChainLoad | None:
        """Reserves places and begins to read."""
        given = self._chains.reserve(len(found), first)
        if given is None:
            return None
        loading = Loading(found, given.parts, lambda done: self._rest_seconds(first, first + len(found), done))
        load = self._loads[disk.key] = ChainLoad(loading, disk.salt, prompt, first, given.places, given.state)
        self._loader.load(loading)
        return load

    def _deliver(self, disk: RequestOnDisk) -> None:
        """Lets the prefix cache find what was read; once, for however many requests."""
        load = disk.load
        if load is None or self._loads.get(disk.key) is not load:
            return
        del self._loads[disk.key]
        loading, usable = load.loading, load.loading.usable
        self._given_up += loading.given_up and usable < len(load.places)
        self._read += self._chains.deliver(load, DISK)
        self._loader.observe(self._bytes_of(max(usable, 1)), loading.seconds)

    def _pays(self, found: Sequence[StoredBlock], first: int) -> bool:
        seconds = self._loader.seconds(self._bytes_of(len(found)))
        pays = seconds <= self._compute_seconds(first, first + len(found))
        if not pays:
            self._loader.forgive()
        return pays

    def _rest_seconds(self, first: int, end: int, done: int) -> float:
        """Returns the seconds that it takes to compute what was not read of a chain. Without the state at its end, what
        was read is of no use."""
        return self._compute_seconds(first if self._states is not None else first + done, end)

    def _bytes_of(self, blocks: int) -> int:
        """Returns the bytes of so many blocks of a chain, and of the state at its end."""
        return blocks * self._store.layout.record_bytes + self._store.layout.state_bytes

    def _compute_seconds(self, first: int, end: int) -> float:
        """Returns the seconds that it takes to compute a prompt's blocks from `first` to `end`."""
        rates = self._measured() if self._prompt_cost.known else self._rates if self._rates.token else UNMEASURED
        return rates.seconds((end - first) * self._size, first * self._size)

    def _measured(self) -> Rates:
        return Rates(self._prompt_cost.seconds(1, 0), self._prompt_cost.seconds(0, 1), self._loader.rate)

    # -- writing -------------------------------------------------------------------------------------------------

    def ended(self, record: RequestRecord, event: End | None) -> None:
        disk = record.disk
        if disk is None:
            return
        if disk.load is not None:
            disk.load.loading.waiters -= 1
            if not disk.load.loading.waiters:
                disk.load.loading.given_up = True
                self._deliver(disk)
        if isinstance(event, Finished):
            self._keep(disk, record.request.prompt)
        elif isinstance(event, Failed) and event.code == NotFinite.code:
            self._store.forget(disk.hashes)

    def after_step(self) -> None:
        """Uses a little of the time between two steps, while none is in flight, to have blocks written."""
        if self.engine.in_flight:
            return
        now = time.perf_counter()
        self._credit = min(self._credit + SHARE * (now - self._last), MOST_CREDIT)
        self._last = now
        if self._prompts and self._credit >= self._cost and not self._writer.full:
            self._write_next(self._prompts)
            cost = time.perf_counter() - now
            self._credit -= cost
            self._cost = min(cost, MOST_CREDIT)

    def use_idle_moment(self) -> bool:
        more = self._write_some() or self._touch(IN_IDLE)
        if not more:
            self._save_rates()
        return more

    def _write_some(self) -> bool:
        """Has a few blocks written; returns False when none are left."""
        self._chains.collect()
        for pending in (self._prompts, self._answers):
            for _ in range(IN_IDLE):
                if pending and not self._writer.full:
                    self._write_next(pending)
        if self._writer.full:
            time.sleep(0.001)
        return bool(self._prompts or self._answers)

    def flush(self) -> None:
        self._prompts.clear()
        self._answers.clear()
        self._writer.drop()
        self._store.clear()

    def stats(self) -> Mapping[str, Any]:
        store = self._store
        skipped = tuple(sorted(store.skipped.items()))
        counts = DiskCounts(
            len(store), store.stored_bytes, store.written, store.dropped, self._read, self._given_up, skipped
        )
        return {"disk": counts}

    def close(self) -> None:
        """Writes what is left, for a moment, and gives the files free."""
        until = time.perf_counter() + CLOSING
        while time.perf_counter() < until and self._write_some():
            pass
        self._writer.close()
        for load in self._loads.values():
            load.loading.given_up = True
        self._loader.close()
        self._save_rates(at_once=True)
        self._store.close()

    def _save_rates(self, at_once: bool = False) -> None:
        """Keeps what was measured for the next server, now and then."""
        now = time.perf_counter()
        if self._prompt_cost.known and self._store.writable and (at_once or now - self._saved > SAVE):
            self._saved = now
            write_rates(self._store.folder, self._measured())

    def _keep(self, disk: RequestOnDisk, prompt: Sequence[int]) -> None:
        """Has the full blocks of a prompt written, and those that follow it in the prefix cache: its answers."""
        nodes = self._cache.trie.match(disk.salt, prompt, len(disk.hashes))
        if disk.load is not None:
            self._chains.free_places(disk.load)
        parents, ending = [hashing.root(disk.salt), *disk.hashes], self._cache.states.deepest(nodes, len(nodes))
        for node, hash, parent in zip(nodes, disk.hashes, parents, strict=False):
            parts = len(node.children) > 1 or node.depth == ending - 1
            self._pend(self._prompts, PendingBlock(node, hash, parent, parts))
        if nodes and len(nodes) == len(disk.hashes):
            for block in _below(nodes[-1], disk.hashes[-1]):
                self._pend(self._answers, block)

    def _pend(self, pending: dict[bytes, PendingBlock], block: PendingBlock) -> None:
        more = block.hash not in self._store or (block.state and self._has_new_state(block))
        if more and len(pending) < MOST_PENDING:
            pending[block.hash] = block if block.state else pending.get(block.hash, block)

    def _has_new_state(self, block: PendingBlock) -> bool:
        """Returns whether there is a state at the end of a block that the store does not know."""
        return max(self._cache.states.where(block.node)) >= 0 and not self._store.has_state(block.hash)

    def _write_next(self, pending: dict[bytes, PendingBlock]) -> None:
        """Gives the next block that is still there to the writer."""
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


def open_prefixes(
    store: SegmentStore | None,
    cache: KvCache,
    host: HostMemory,
    backend: Backend,
    limits: Limits,
    costs: CostModel,
    chain: hashing.Chain,
) -> Feature:
    """Returns what keeps prompts in a store, if there is one, and memory to read them into."""
    if store is None or host.blocks is None:
        return Feature()
    return DiskPrefixes(store, cache, host.blocks, host.states, backend.kv, limits, costs.prompts, chain)


def pack(tokens: Sequence[int]) -> bytes:
    """Returns tokens as little-endian 32-bit integers."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def _below(node: PrefixNode, hash: bytes) -> Iterator[PendingBlock]:
    """Yields what follows a node with this chain hash, parents first."""
    stack = [(node, hash)]
    while stack:
        node, hash = stack.pop()
        for child in node.children.values():
            own = hashing.extend(hash, child.tokens)
            yield PendingBlock(child, own, hash, True)
            stack.append((child, own))
