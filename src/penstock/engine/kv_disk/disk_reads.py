"""Reads prompts from disk into reserved places of the host tier, where the prefix cache finds them (core/tiers.py)."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core import hashing
from penstock.core.kvcache import KvCache
from penstock.core.tiers import DISK
from penstock.engine.chain_loads import ChainLoad, ChainLoads
from penstock.engine.kv_disk.loading import Loader, Loading
from penstock.engine.kv_disk.rates import PromptRates
from penstock.engine.kv_disk.segment import pack
from penstock.engine.kv_disk.store import SegmentStore, StoredBlock


class RequestOnDisk:
    """Identifies a request's prompt on disk, and holds the read in progress."""

    __slots__ = ("hashes", "key", "load", "salt")

    def __init__(self, salt: str, hashes: list[bytes]) -> None:
        self.salt = salt
        self.hashes = hashes  # chain hashes of the prompt's full blocks
        self.load: ChainLoad | None = None
        self.key = b""  # the chain hash of the first block that is being read


class DiskReads:
    """Reads a prompt that the `store` knows if that is faster than computing it. `whole`: blocks are of no use without
    the recurrent state at their end."""

    def __init__(
        self,
        store: SegmentStore,
        cache: KvCache,
        chains: ChainLoads,
        rates: PromptRates,
        *,
        block_size: int,
        whole: bool,
    ) -> None:
        self.loader = Loader(store, rates.last.read)
        self.read = self.given_up = 0  # blocks; chains
        self._store = store
        self._cache = cache
        self._chains = chains
        self._rates = rates
        self._size = block_size
        self._whole = whole
        self._loads: dict[bytes, ChainLoad] = {}  # keys are chain hashes of the first blocks

    def begin(self, disk: RequestOnDisk, prompt: Sequence[int]) -> ChainLoad | None:
        """Begins to read the part of a prompt that the prefix cache lacks, if the store has it and reading pays. The
        last token is always computed."""
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
        return self._load(found, disk, prompt, first)

    def leave(self, disk: RequestOnDisk) -> None:
        """Stops reading for a request that has ended, unless others wait for the same blocks."""
        if disk.load is None:
            return
        disk.load.loading.waiters -= 1
        if not disk.load.loading.waiters:
            disk.load.loading.given_up = True
            self.deliver(disk)

    def close(self) -> None:
        for load in self._loads.values():
            load.loading.given_up = True
        self.loader.close()

    def deliver(self, disk: RequestOnDisk) -> None:
        """Puts the blocks that were read into the prefix cache, once for all waiting requests."""
        load = disk.load
        if load is None or self._loads.get(disk.key) is not load:
            return
        del self._loads[disk.key]
        loading, usable = load.loading, load.loading.usable
        self.given_up += loading.given_up and usable < len(load.places)
        self.read += self._chains.deliver(load, DISK)
        self.loader.observe(self._bytes_of(max(usable, 1)), loading.seconds)

    def _load(
        self, found: list[StoredBlock], disk: RequestOnDisk, prompt: Sequence[int], first: int
    ) -> ChainLoad | None:
        given = self._chains.reserve(len(found), first)
        if given is None:
            return None
        loading = Loading(found, given.parts, lambda done: self._rest_seconds(first, first + len(found), done))
        load = self._loads[disk.key] = ChainLoad(loading, disk.salt, prompt, first, given.places, given.state)
        self.loader.load(loading)
        return load

    def _pays(self, found: Sequence[StoredBlock], first: int) -> bool:
        seconds = self.loader.seconds(self._bytes_of(len(found)))
        pays = seconds <= self._compute_seconds(first, first + len(found))
        if not pays:
            self.loader.forgive()
        return pays

    def _rest_seconds(self, first: int, end: int, done: int) -> float:
        """Returns the seconds that the unread part of a chain takes to compute. Without the state at its end, blocks
        are useless."""
        return self._compute_seconds(first if self._whole else first + done, end)

    def _bytes_of(self, blocks: int) -> int:
        return blocks * self._store.layout.record_bytes + self._store.layout.state_bytes

    def _compute_seconds(self, first: int, end: int) -> float:
        return self._rates.seconds((end - first) * self._size, first * self._size)
