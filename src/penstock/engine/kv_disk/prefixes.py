"""Keeps prompts on disk for an engine: what was computed is written behind, and what is known is read before a request
runs.

Blocks go from disk to reserved places of the host tier, where the prefix cache finds them (core/tiers.py). The
scheduler knows nothing of disks.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.backend.base import Backend, BlockMemory
from penstock.core import hashing
from penstock.core.kvcache import KvCache
from penstock.core.prefix import PrefixNode
from penstock.core.step_cost import CostModel, PromptCost
from penstock.engine.host_blocks import HostBlocks
from penstock.engine.kv_disk.loading import Loader, Loading
from penstock.engine.kv_disk.rates import Rates, read_rates, write_rates
from penstock.engine.kv_disk.store import SegmentStore, StoredBlock
from penstock.engine.kv_disk.writing import BlockToWrite, Writer
from penstock.engine.record import RequestRecord
from penstock.engine.waiting import Need
from penstock.errors import NotFinite
from penstock.types import Aborted, DiskCounts, Failed, Finished, Limits, WeightState

SHARE = 0.005  # of the time, while requests run, that is spent on blocks that are to be written
MOST_CREDIT = 0.005  # seconds of that time that are saved up
IN_IDLE = 4  # blocks that are prepared at once while nothing runs
MOST_PENDING = 16384  # blocks that wait until there is time
CLOSING = 1.0  # seconds for what is left at the end
UNMEASURED = Rates(token=1 / 2000)  # is taken for true before any server has measured
TOUCHED = 48 << 20  # bytes of each tier's memory that are touched at the start
SAVE = 60.0  # seconds between two notes of the rates


class ChainLoad(NamedTuple):
    """Is a part of a prompt that is read from disk."""

    key: bytes  # the chain hash of its first block
    loading: Loading
    salt: str
    prompt: Sequence[int]
    first: int  # block
    places: list[list[int]]  # of each block, by layer group


class RequestOnDisk:
    """Belongs to one request: what its prompt is called on disk, and what is being read of it."""

    __slots__ = ("hashes", "load", "salt")

    def __init__(self, salt: str, hashes: list[bytes]) -> None:
        self.salt = salt
        self.hashes = hashes  # of the full blocks of its prompt
        self.load: ChainLoad | None = None


class PendingBlock(NamedTuple):
    """Is a block that is to be written once there is time."""

    node: PrefixNode
    hash: bytes
    parent: bytes


class NoDiskPrefixes:
    """Serves engines that keep nothing on disk."""

    def needs(self, record: RequestRecord, weights: WeightState) -> list[Need]:
        """Returns what a request that could run now should wait for; once for each request."""
        return []

    def end(self, record: RequestRecord, event: Finished | Aborted | Failed) -> None:
        """Takes note of a request that has ended."""

    def write_behind(self) -> None:
        """Uses a little of the time between two steps, while none is in flight, to have blocks written."""

    def write_in_idle(self) -> bool:
        """Uses a moment without requests; returns False when nothing is left to write."""
        return False

    def clear(self) -> None:
        """Forgets all prompts."""

    def counts(self) -> DiskCounts:
        """Returns what was counted so far."""
        return DiskCounts()

    def close(self) -> None:
        """Writes what is left, for a moment, and gives the files free."""


class DiskPrefixes(NoDiskPrefixes):
    """Has prompts that a `store` knows read into places of the `host`, where `cache` finds them, if `prompts` take
    longer to compute, and has new ones written that `memory` or the host holds."""

    def __init__(
        self,
        store: SegmentStore,
        cache: KvCache,
        host: HostBlocks,
        memory: BlockMemory,
        limits: Limits,
        prompts: PromptCost,
        chain: hashing.Chain,
    ) -> None:
        self._store = store
        self._cache = cache
        self._host = host
        self._memory = memory
        self._windows = limits.windows
        self._longest = limits.max_len
        self._size = limits.block_size
        self._prompt_cost = prompts
        self._chain = chain
        self._rates = read_rates(store.folder)  # by the last server
        self._loader = Loader(store, self._rates.read)
        self._writer = Writer(store)
        self._loads: dict[bytes, ChainLoad] = {}  # by the chain hash of their first block
        self._abandoned: list[tuple[Loading, list[list[int]]]] = []  # with places that threads may still write to
        self._prompts: dict[bytes, PendingBlock] = {}
        self._answers: dict[bytes, PendingBlock] = {}  # are written while nothing runs
        self._credit = self._cost = 0.0  # seconds: that may be spent, that a block takes
        self._last = time.perf_counter()
        self._saved = self._last  # when the rates were
        self._read = self._given_up = 0
        self._touch(min(len(store), TOUCHED // host.block_bytes, limits.num_blocks, limits.host_places))

    def _touch(self, count: int) -> None:
        """Touches the memory that the first prompts after a restart are read into, which the system gives slowly: of
        free blocks, and of places, none of which is in use yet."""
        zeros, free = bytes(self._host.block_bytes), self._cache.pool.snapshot()
        for at in range(count):
            if at in free:
                self._memory.import_blocks([at], zeros)
            self._host.fill(at)[:] = zeros

    # -- reading -------------------------------------------------------------------------------------------------

    def needs(self, record: RequestRecord, weights: WeightState) -> list[Need]:
        request = record.request
        fits = self._size <= len(request.prompt) < self._longest
        if record.disk is not None or not (request.durable and fits) or weights.updates or record.pooling == "mean":
            return []
        salt = record.salt(weights)
        record.disk = disk = RequestOnDisk(salt, self._chain(salt, request.prompt, self._size))
        if request.sampling.prompt_logprobs is None:
            disk.load = self._load(disk, request.prompt)
        load = disk.load
        return [] if load is None else [Need("kv", load.loading, lambda: self._deliver(load))]

    def _load(self, disk: RequestOnDisk, prompt: Sequence[int]) -> ChainLoad | None:
        """Begins to read what the prefix cache has not of a prompt, if that is known and pays. The last token is always
        computed."""
        self._collect()
        end = (len(prompt) - 1) // self._size
        known = self._cache.trie.match(disk.salt, prompt, end)
        first = len(known)
        if first == end or disk.hashes[first] not in self._store:
            return None
        if (load := self._loads.get(disk.hashes[first])) is not None:
            load.loading.waiters += 1
            return load
        parent = disk.hashes[first - 1] if first else hashing.root(disk.salt)
        tokens = [pack(prompt[at * self._size : (at + 1) * self._size]) for at in range(first, end)]
        found = self._store.find(parent, disk.hashes[first:end], tokens)
        found = found[: self._reusable(found, first)]
        if not found or not self._pays(found, first):
            return None
        for node in reversed(known):
            self._cache.host.touch(node)
        return self._begin(found, disk, prompt, first)

    def _begin(
        self, found: list[StoredBlock], disk: RequestOnDisk, prompt: Sequence[int], first: int
    ) -> ChainLoad | None:
        """Reserves places and begins to read."""
        wanted = self._wanted(len(found), first)
        places = self._cache.host.reserve(sum(map(sum, wanted)))
        if len(places) < sum(map(sum, wanted)):
            self._cache.host.give_back(places)
            return None
        left = iter(places)
        chosen = [[next(left) if want else -1 for want in groups] for groups in wanted]
        targets = [[self._host.fill(place) if place >= 0 else None for place in each] for each in chosen]
        loading = Loading(found, targets, lambda done: self._compute_seconds(first + done, first + len(found)))
        load = ChainLoad(disk.hashes[first], loading, disk.salt, prompt, first, chosen)
        self._loads[load.key] = load
        self._loader.load(loading)
        return load

    def _deliver(self, load: ChainLoad) -> None:
        """Lets the prefix cache find what was read; once, for however many requests."""
        key, loading, salt, prompt, first, places = load
        if self._loads.get(key) is not load:
            return
        del self._loads[key]
        usable = loading.usable
        self._given_up += loading.given_up and usable < len(places)
        self._read += self._cache.attach(salt, prompt, first, places[:usable])
        self._abandoned.append((loading, places[usable:]))
        self._loader.observe(max(usable, 1) * self._store.layout.record_bytes, loading.seconds)
        self._collect()

    def _collect(self) -> None:
        """Gives places back that no thread writes to any longer."""
        for entry in [entry for entry in self._abandoned if entry[0].finished]:
            self._abandoned.remove(entry)
            self._cache.host.give_back(place for each in entry[1] for place in each if place >= 0)

    def _reusable(self, found: Sequence[StoredBlock], first: int) -> int:
        """Returns how many of the blocks a request can begin with: the most whose last windows are on disk too."""
        count = len(found)
        while count > 0:
            wanted = self._wanted(count, first)
            holes = [
                at for at in range(count) for group, want in enumerate(wanted[at]) if want > found[at].record.has(group)
            ]
            if not holes:
                break
            count = max(holes)
        return count

    def _wanted(self, count: int, first: int) -> list[list[bool]]:
        """Returns of each block whether its layer groups are needed, if a request begins after `count` blocks."""
        starts = self._cache.trie.window_starts((first + count) * self._size)
        return [[first + at >= start for start in starts] for at in range(count)]

    def _pays(self, found: Sequence[StoredBlock], first: int) -> bool:
        seconds = self._loader.seconds(len(found) * self._store.layout.record_bytes)
        pays = seconds <= self._compute_seconds(first, first + len(found))
        if not pays:
            self._loader.forgive()
        return pays

    def _compute_seconds(self, first: int, end: int) -> float:
        """Returns the seconds that it takes to compute a prompt's blocks from `first` to `end`."""
        rates = self._measured() if self._prompt_cost.known else self._rates if self._rates.token else UNMEASURED
        return rates.seconds((end - first) * self._size, first * self._size)

    def _measured(self) -> Rates:
        return Rates(self._prompt_cost.seconds(1, 0), self._prompt_cost.seconds(0, 1), self._loader.rate)

    # -- writing -------------------------------------------------------------------------------------------------

    def end(self, record: RequestRecord, event: Finished | Aborted | Failed) -> None:
        disk = record.disk
        if disk is None:
            return
        if disk.load is not None:
            disk.load.loading.waiters -= 1
            if not disk.load.loading.waiters:
                disk.load.loading.given_up = True
                self._deliver(disk.load)
        if isinstance(event, Finished):
            self._keep(disk, record.request.prompt)
        elif isinstance(event, Failed) and event.code == NotFinite.code:
            self._store.forget(disk.hashes)

    def write_behind(self) -> None:
        now = time.perf_counter()
        self._credit = min(self._credit + SHARE * (now - self._last), MOST_CREDIT)
        self._last = now
        if self._prompts and self._credit >= self._cost and not self._writer.full:
            self._write_next(self._prompts)
            self._cost = time.perf_counter() - now
            self._credit -= self._cost

    def write_in_idle(self) -> bool:
        self._collect()
        for pending in (self._prompts, self._answers):
            for _ in range(IN_IDLE):
                if pending and not self._writer.full:
                    self._write_next(pending)
        if self._writer.full:
            time.sleep(0.001)
        if not (self._prompts or self._answers):
            self._save_rates()
            return False
        return True

    def clear(self) -> None:
        self._prompts.clear()
        self._answers.clear()
        self._writer.drop()
        self._store.clear()

    def counts(self) -> DiskCounts:
        store = self._store
        skipped = tuple(sorted(store.skipped.items()))
        return DiskCounts(
            len(store), store.stored_bytes, store.written, store.dropped, self._read, self._given_up, skipped
        )

    def close(self) -> None:
        until = time.perf_counter() + CLOSING
        while time.perf_counter() < until and self.write_in_idle():
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
        if disk.load is not None and not any(self._windows):
            self._free_places(nodes[disk.load.first :])
        parents = [hashing.root(disk.salt), *disk.hashes]
        for node, hash, parent in zip(nodes, disk.hashes, parents, strict=False):
            self._pend(self._prompts, PendingBlock(node, hash, parent))
        if nodes and len(nodes) == len(disk.hashes):
            for block in _below(nodes[-1], disk.hashes[-1]):
                self._pend(self._answers, block)

    def _free_places(self, nodes: Sequence[PrefixNode]) -> None:
        """Frees the places of blocks that were read and that the device has now: the disk has them too. The next
        prompt is read into the same memory, which is faster than memory that was never touched."""
        for node in nodes:
            if self._cache.trie.on_device(node):
                self._cache.host.drop(node)

    def _pend(self, pending: dict[bytes, PendingBlock], block: PendingBlock) -> None:
        if block.hash not in self._store and len(pending) < MOST_PENDING:
            pending.setdefault(block.hash, block)

    def _write_next(self, pending: dict[bytes, PendingBlock]) -> None:
        """Gives the next block that is still there to the writer."""
        while pending:
            node, hash, parent = pending.pop(next(iter(pending)))
            contents = tuple(self._contents(node, group) for group in range(len(self._windows)))
            gone = any(data is None and not window for data, window in zip(contents, self._windows, strict=True))
            if not gone and hash not in self._store:
                self._writer.write(BlockToWrite(hash, parent, pack(node.tokens), contents))
                return

    def _contents(self, node: PrefixNode, group: int) -> bytes | None:
        """Returns a copy of a node's block of a layer group; None if it is on neither tier."""
        if node.blocks[group] >= 0:
            return self._memory.export_blocks([node.blocks[group]])
        return bytes(self._host.read(node.places[group])) if node.places[group] >= 0 else None


def open_prefixes(
    store: SegmentStore | None,
    cache: KvCache,
    host: HostBlocks | None,
    backend: Backend,
    limits: Limits,
    costs: CostModel,
    chain: hashing.Chain,
) -> NoDiskPrefixes:
    """Returns what keeps prompts in a store, if there is one, and memory to read them into."""
    if store is None or host is None:
        return NoDiskPrefixes()
    return DiskPrefixes(store, cache, host, backend.kv, limits, costs.prompts, chain)


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
            yield PendingBlock(child, own, hash)
            stack.append((child, own))
