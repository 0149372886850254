"""Keeps prompts on disk: computed blocks are written in the background, and known ones are read before a request runs.

Blocks go from disk to reserved places of the host tier, where the prefix cache finds them (core/tiers.py). The
scheduler knows nothing of disks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.backend.base import Backend, BlockMemory
from penstock.config import Config
from penstock.core import hashing
from penstock.core.kvcache import KvCache
from penstock.core.step_cost import CostModel, PromptCost
from penstock.engine.chain_loads import ChainLoads
from penstock.engine.feature import End, Feature
from penstock.engine.host_blocks import HostBlocks, HostMemory, HostStateCopies
from penstock.engine.kv_disk.disk_reads import DiskReads, RequestOnDisk
from penstock.engine.kv_disk.disk_writes import DiskWrites
from penstock.engine.kv_disk.rates import PromptRates
from penstock.engine.kv_disk.segment import BlockLayout
from penstock.engine.kv_disk.store import SegmentStore
from penstock.engine.request_record import RequestRecord
from penstock.engine.waiting import Need
from penstock.errors import ConfigError, NotFinite
from penstock.types import DiskCounts, Failed, Finished, Limits

TOUCHED = 48 << 20  # bytes of each tier's memory that are touched at the start
AHEAD = 192 << 20  # bytes of the device's memory that are touched in idle before they are needed
AT_ONCE = 4  # blocks that are touched in an idle moment


class TouchedMemory:
    """Touches memory before prompts are read into it: the system gives memory slowly, for the blocks of a prompt more
    slowly than they are read."""

    def __init__(self, store: SegmentStore, cache: KvCache, host: HostBlocks, memory: BlockMemory, blocks: int) -> None:
        self._store = store
        self._cache = cache
        self._host = host
        self._memory = memory
        self._touched = bytearray(blocks)

    def prepare(self) -> None:
        count = min(len(self._store), TOUCHED // self._host.block_bytes)
        for place in range(min(count, self._host.places)):
            self._host.fill(place)[:] = bytes(self._host.block_bytes)
        self.touch(count)

    def touch(self, most: int) -> bool:
        """Touches at most `most` of the free blocks that prompts are copied into next; returns whether there were
        any."""
        ahead = self._cache.pool.upcoming(min(len(self._store), AHEAD // self._host.block_bytes))
        kept = self._cache.tails.blocks
        untouched = [block for block in ahead if not self._touched[block] and block not in kept][:most]
        self._memory.touch_blocks(untouched)
        for block in untouched:
            self._touched[block] = 1
        return bool(untouched)


class DiskPrefixes(Feature):
    """Reads prompts that a `store` has into places of the `host`, where `cache` finds them, if `prompts` take longer to
    compute, and writes new ones from `memory` or the host."""

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
        self._limits = limits
        self._chain = chain
        self._rates = PromptRates(store.folder, prompts)
        self._chains = ChainLoads(cache, host, states, limits)
        self._reads = DiskReads(
            store, cache, self._chains, self._rates, block_size=limits.block_size, whole=states is not None
        )
        self._writes = DiskWrites(store, cache, host, states, limits.windows)
        self._touched = TouchedMemory(store, cache, host, memory, limits.num_blocks)
        if len(store):  # the first prompt after a restart shall not wait for memory and threads
            self._touched.prepare()
            self._reads.loader.start()

    def reads(self, record: RequestRecord) -> Sequence[Need]:
        request, weights = record.request, self.engine.weights
        fits = self._limits.block_size <= len(request.prompt) < self._limits.max_len
        if record.disk is not None or not (request.durable and fits) or weights.updates or record.pools_from_start:
            return []
        salt = record.salt(weights)
        record.disk = disk = RequestOnDisk(salt, self._chain(salt, request.prompt, self._limits.block_size))
        if request.sampling.prompt_logprobs is None:
            disk.load = self._reads.begin(disk, request.prompt)
        return [] if disk.load is None else [Need("kv", disk.load.loading, lambda: self._reads.deliver(disk))]

    def ended(self, record: RequestRecord, event: End | None) -> None:
        disk = record.disk
        if disk is None:
            return
        self._reads.leave(disk)
        if isinstance(event, Finished):
            self._writes.keep(disk, record.request.prompt)
            if disk.load is not None:
                self._chains.free_places(disk.load)
        elif isinstance(event, Failed) and event.code == NotFinite.code:
            self._store.forget(disk.hashes)

    def after_step(self) -> None:
        if not self.engine.pipeline.in_flight:
            self._writes.write_between_steps()

    def use_idle_moment(self) -> bool:
        self._chains.collect()
        more = self._writes.write_some() or self._touched.touch(AT_ONCE)
        if not more and self._store.writable:
            self._rates.save(self._reads.loader.rate)
        return more

    def flush(self) -> None:
        self._writes.drop()
        self._store.clear()

    def stats(self) -> Mapping[str, Any]:
        store, reads = self._store, self._reads
        skipped = tuple(sorted(store.skipped.items()))
        counts = DiskCounts(
            len(store), store.stored_bytes, store.written, store.dropped, reads.read, reads.given_up, skipped
        )
        return {"disk": counts}

    def close(self) -> None:
        self._writes.close()
        self._reads.close()
        if self._store.writable:
            self._rates.save(self._reads.loader.rate, at_once=True)
        self._store.close()


def open_prefixes(
    store: SegmentStore | None,
    cache: KvCache,
    host: HostMemory,
    backend: Backend,
    limits: Limits,
    costs: CostModel,
    chain: hashing.Chain,
) -> Feature:
    if store is None or host.blocks is None:
        return Feature()
    return DiskPrefixes(store, cache, host.blocks, host.states, backend.kv, limits, costs.prompts, chain)


def open_store(
    config: Config, blocks: bytes, backend: Backend, limits: Limits, tell: Callable[[str], None]
) -> SegmentStore | None:
    """Returns the store for a model whose blocks have this identity; None if the disk tier is off, or impossible for
    such a model (see missing_tiers). `tell` reports blocks of earlier servers."""
    if not config.kv_disk or limits.encoder:
        return None
    if not hasattr(os, "preadv"):
        raise ConfigError("kv_disk needs reads that this system does not have: leave it out, or use WSL on Windows")
    block_bytes = len(backend.kv.export_blocks([0]))
    state_bytes = len(backend.states.export_blocks([0])) if limits.states else 0
    if not limits.host_places or (state_bytes and not limits.host_states):
        least = f" of at least {block_bytes + state_bytes:,}" if state_bytes else ""
        raise ConfigError(f"kv_disk needs host memory to read blocks into: set kv_ram to a number of bytes{least}")
    layout = BlockLayout(blocks, limits.block_size, len(limits.windows), block_bytes, state_bytes)
    store = SegmentStore(Path(config.kv_disk).expanduser(), layout, config.kv_disk_bytes)
    store.open()
    if len(store):
        tell(f"KV on disk: {len(store) * limits.block_size:,} tokens of earlier prompts in {config.kv_disk}")
    return store
