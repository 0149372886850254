"""Reads blocks of prompts from other engines before their requests run. If anything fails, the rest is computed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from penstock.backend.base import BlockMemory
from penstock.backend.blocks.rows import BlockRows
from penstock.backend.blocks.sharing import DeviceSharing
from penstock.core import hashing
from penstock.core.incoming import take_in
from penstock.core.kvcache import KvCache
from penstock.core.prefix import PrefixNode
from penstock.core.step_cost import PromptCost
from penstock.core.tiers import PEER
from penstock.engine.chain_loads import ChainLoad, ChainLoads, Reserved
from penstock.engine.host_blocks import HostMemory
from penstock.engine.kv_disk.loading import Loading
from penstock.engine.kv_disk.rates import UNMEASURED
from penstock.engine.kv_disk.segment import pack
from penstock.engine.kv_transfer.reader import OfferReader, WantedBlock
from penstock.engine.kv_transfer.state_parts import names, part_targets
from penstock.engine.kv_transfer.wire import TransferRefused
from penstock.engine.request_record import RequestRecord
from penstock.engine.waiting import Need
from penstock.types import BlockOffer, Limits, WeightState

if TYPE_CHECKING:
    from penstock.engine.kv_transfer.direct_reader import DirectReader

READERS = 2  # threads
PATIENCE = 0.25  # share of the compute time before reading is judged
HARM = 2.0  # times as long as computing takes, reading may take
OTHER_MODEL, OTHER_PROMPT, NEW_WEIGHTS = "other_model", "other_prompt", "new_weights"
NO_ROOM, GAP, SLOW, FAILED_COPY = "no_room", "gap", "slow", "failed_copy"


class _Pull(NamedTuple):
    """Is what one request reads."""

    load: ChainLoad
    reader: OfferReader
    direct: DirectReader | None = None  # the same reader, if blocks are copied straight to the KV cache


class PullThreads:
    """Reads offers in a few threads, in the order in which they come."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Pull | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, pull: _Pull) -> None:
        if len(self._threads) < READERS:
            thread = threading.Thread(target=self._work, name="penstock-pulling", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queue.put(pull)

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (pull := self._queue.get()) is not None:
            pull.load.loading.run(pull.reader)
            if not pull.reader.stays_open or pull.load.loading.given_up:
                pull.reader.close()


class PullCounts:
    """Counts pulls and what became of them."""

    def __init__(self) -> None:
        self.pulls = self.blocks = 0
        self.carriers: Counter[str] = Counter()  # pulls, by what brought the blocks
        self.passed_over: Counter[str] = Counter()  # carriers that could not be used, so the next was
        self.failures: Counter[str] = Counter()  # keys are reasons
        self.seconds = 0.0


class NoPulls:
    """Reads nothing: offers cannot be used for lack of memory to read into."""

    def __init__(self, counts: PullCounts) -> None:
        self._counts = counts

    def needs(self, record: RequestRecord, weights: WeightState) -> list[Need]:
        """Returns the wait of a ready request for the blocks that were offered for it. An offer is tried once."""
        if record.request.pull is not None:
            record.request = record.request._replace(pull=None)
            self._counts.failures[NO_ROOM] += 1
        return []

    def end(self, record: RequestRecord) -> None: ...

    def close(self) -> None: ...


class BlockPulls(NoPulls):
    """Reads offered blocks into places of the `host`, where `cache` finds them, or straight into `memory` if it has
    rows or engines share its device, unless `prompts` are computed sooner. Calls `distrust` when cached blocks may be
    wrong."""

    def __init__(
        self,
        cache: KvCache,
        host: HostMemory,
        limits: Limits,
        memory: BlockMemory,
        sharing: DeviceSharing | None,
        prompts: PromptCost,
        chain: hashing.Chain,
        identity: bytes,
        counts: PullCounts,
        distrust: Callable[[], None],
    ) -> None:
        super().__init__(counts)
        self._cache = cache
        self._host = host.blocks
        self._block_bytes = len(memory.export_blocks([0]))
        self._sharing = None if limits.states else sharing  # states travel only through host memory
        self._rows = memory if isinstance(memory, BlockRows) and not limits.states else None
        self._distrust = distrust
        self._size = limits.block_size
        self._prompts = prompts
        self._chain = chain
        self._identity = identity
        self._states = host.states
        self._chains = ChainLoads(cache, host.blocks, host.states, limits)
        self._threads = PullThreads()
        self._reading: dict[int, _Pull] = {}  # keys are request ids

    def needs(self, record: RequestRecord, weights: WeightState) -> list[Need]:
        offer, request = record.request.pull, record.request
        if offer is None:
            return []
        record.request = request._replace(pull=None)
        if request.sampling.prompt_logprobs is not None or record.pools_from_start:
            return []
        try:
            pull = self._begin(offer, record.salt(weights), request.prompt + request.generated, weights)
        except TransferRefused as refused:
            self._counts.failures[refused.reason] += 1
            return []
        if pull is None:
            return []
        record.pull = pull.load
        self._reading[request.id] = pull
        self._threads.start(pull)
        return [Need("peer", pull.load.loading, lambda: self._deliver(request.id))]

    def _begin(self, offer: BlockOffer, salt: str, prompt: Sequence[int], weights: WeightState) -> _Pull | None:
        """Reserves places for the offered blocks that are missing of a prompt; None: none are. Raises TransferRefused
        if the offer is of no use."""
        if weights.updates:
            raise TransferRefused(NEW_WEIGHTS)
        if offer.identity != self._identity:
            raise TransferRefused(OTHER_MODEL)
        hashes, end = self._chain(salt, prompt, self._size), (len(prompt) - 1) // self._size
        if tuple(hashes[offer.first : offer.first + len(offer.hashes)]) != offer.hashes:
            raise TransferRefused(OTHER_PROMPT)
        known = self._cache.trie.match(salt, prompt, end)
        if len(known) < offer.first:
            raise TransferRefused(GAP)
        first = max(offer.first, self._cache.states.deepest(known, len(known)))
        skipped = first - offer.first
        count = self._chains.reusable(offer.present[skipped : end - offer.first], first)
        if not count:
            return None
        direct = self._direct(offer, skipped, count, known, first)
        given = self._reserve(count, first, known, direct)
        parents, size = [hashing.root(salt), *hashes], self._size
        blocks = [
            WantedBlock(hashes[at], parents[at], pack(prompt[at * size : (at + 1) * size]))
            for at in range(first, first + count)
        ]
        targets = list(given.targets)
        if given.state_target is not None:
            parts = part_targets(given.state_target, self._block_bytes, self._cache.groups)
            blocks += names(blocks[-1].hash, len(parts), 4 * size)
            targets += parts
        rest = partial(self._compute_seconds, first, first + count)
        loading = Loading(blocks, targets, rest, threads=1, patience=PATIENCE)
        reader = direct or OfferReader(offer, skipped, len(blocks), self._cache.groups, self._block_bytes)
        return _Pull(ChainLoad(loading, salt, prompt, first, given.places, given.state), reader, direct)

    def _direct(
        self, offer: BlockOffer, skipped: int, count: int, known: Sequence[PrefixNode], first: int
    ) -> DirectReader | None:
        """Returns a reader that copies offered blocks straight to the KV cache; None: that is not possible."""
        if self._sharing is not None:
            from penstock.engine.kv_transfer.cuda_ipc import device_reader  # imports sockets, which take long

            near = device_reader(offer, skipped, count, self._cache.groups, self._sharing)
            if near is not None:
                return near
        if self._rows is None or len(known) != first or not all(map(self._cache.trie.on_device, known)):
            return None
        if sum(map(sum, self._chains.wanted(count, first))) > self._cache.available:
            return None
        from penstock.engine.kv_transfer.mapped_reader import MappedReader, can_map

        if not can_map(offer):
            return None
        return MappedReader(offer, skipped, count, self._cache.groups, self._block_bytes, self._rows)

    def _reserve(self, count: int, first: int, known: Sequence[PrefixNode], direct: DirectReader | None) -> Reserved:
        """Reserves places for blocks; those that are copied directly need none. Raises TransferRefused if there is no
        room."""
        if direct is not None:
            targets = direct.targets(self._chains.wanted(count, first))
            return Reserved([[-1] * self._cache.groups] * count, targets)
        self._chains.collect()
        given = self._chains.reserve(count, first)
        if given is None:
            raise TransferRefused(NO_ROOM)
        for node in reversed(known):
            self._cache.host.touch(node)
        return given

    def end(self, record: RequestRecord) -> None:
        load = record.pull
        if load is None:
            return
        load.loading.given_up = True
        self._deliver(record.request.id)
        self._chains.free_places(load)

    def close(self) -> None:
        for pull in self._reading.values():
            pull.load.loading.given_up = True
        self._threads.close()

    def _deliver(self, id: int) -> None:
        pull = self._reading.pop(id, None)
        if pull is None:
            return
        load, reader, direct = pull
        read = min(load.loading.usable, len(load.places))
        self._counts.seconds += load.loading.seconds
        if direct is not None:
            read = self._copy(load, direct)
        if read if direct is not None else self._chains.deliver(load, PEER):
            self._counts.pulls += 1
            self._counts.blocks += read
            self._counts.carriers[reader.carrier] += 1
        self._counts.passed_over.update(reader.passed_over)
        if read < len(load.places) or not load.loading.whole:
            self._counts.failures[reader.reason or SLOW] += 1

    def _copy(self, load: ChainLoad, reader: DirectReader) -> int:
        """Copies blocks straight to the KV cache; returns how many it has now."""
        began, usable = time.perf_counter(), load.loading.usable
        end = load.first + usable
        skipped = max(len(self._cache.trie.match(load.salt, load.prompt, end)) - load.first, 0)  # came meanwhile
        wanted = self._chains.wanted(len(load.places), load.first)[skipped:usable]

        def fill(blocks: list[list[int]]) -> int:
            try:
                if evicted := self._cache.take_copies():
                    assert self._host is not None
                    self._host.carry_out(evicted)  # before what they were copied from is overwritten
                return reader.fill(blocks, skipped)
            except Exception:  # evicted blocks may not be on the host
                reader.reason = FAILED_COPY
                self._distrust()
                return 0

        used = skipped
        if wanted:
            used += take_in(self._cache, load.salt, load.prompt, load.first + skipped, wanted, fill)
        if load.loading.finished:
            reader.close()  # else its thread does
        if used < usable and not reader.reason:
            reader.reason = GAP
        self._counts.seconds += time.perf_counter() - began
        return used

    def _compute_seconds(self, first: int, end: int, done: int) -> float:
        """Returns the seconds that reading a prompt's blocks from `first` to `end`, except `done` of them, may take:
        more than computing them, since others would wait meanwhile. An engine that pulls computes few prompts itself,
        and underestimates their time. Without the state at a chain's end, blocks are useless."""
        done = 0 if self._states is not None else done
        tokens, context = (end - first - done) * self._size, (first + done) * self._size
        measured = self._prompts.seconds(tokens, tokens * (context + tokens / 2)) if self._prompts.known else 0.0
        return HARM * max(measured, UNMEASURED.seconds(tokens, context))
