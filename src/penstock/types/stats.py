"""Defines the engine's counters, and its introduction to a client."""

from __future__ import annotations

from typing import NamedTuple

from penstock.types.events import AdapterInfo, DraftCounts
from penstock.types.request import Limits

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens: bounds of a histogram


class AdapterRequests(NamedTuple):
    """Counts the requests that name an adapter and have not ended."""

    name: str
    running: int  # those whose adapter is in its slot
    waiting: int  # those that wait for a slot


class DiskCounts(NamedTuple):
    """Counts KV blocks on disk."""

    blocks: int = 0  # that can be read
    bytes: int = 0  # that they take
    written: int = 0  # blocks, as all that follow
    dropped: int = 0  # dropped to make room
    read: int = 0
    given_up: int = 0  # loads, because computing was sooner
    skipped: tuple[tuple[str, int], ...] = ()  # skipped files and blocks, by reason

    def plus(self, other: DiskCounts) -> DiskCounts:
        """Returns the counts of both."""
        skipped = {reason: dict(self.skipped).get(reason, 0) for reason, _ in (*self.skipped, *other.skipped)}
        for reason, count in other.skipped:
            skipped[reason] += count
        names = DiskCounts._fields[:-1]
        added = {name: getattr(self, name) + getattr(other, name) for name in names}
        return DiskCounts(**added, skipped=tuple(sorted(skipped.items())))


Reasons = tuple[tuple[str, int], ...]  # how often each occurred


class PeerCounts(NamedTuple):
    """Counts KV blocks that engines read from each other."""

    pulls: int = 0  # requests that blocks were read for
    pulled_blocks: int = 0
    pulled_tokens: int = 0
    pull_seconds: float = 0.0  # from the first byte asked for to the last block
    failures: Reasons = ()  # pulls of which something had to be computed after all
    offers: int = 0
    offered_blocks: int = 0
    read_blocks: int = 0  # by others, of those offered
    refusals: Reasons = ()  # of others who wanted to read
    leased_blocks: int = 0  # now
    carriers: Reasons = ()  # pulls, by what carried the blocks: shm, tcp, nixl
    passed_over: Reasons = ()  # carriers that could not be used, so that the next one was tried

    def plus(self, other: PeerCounts) -> PeerCounts:
        """Returns the counts of both."""
        return PeerCounts(
            self.pulls + other.pulls,
            self.pulled_blocks + other.pulled_blocks,
            self.pulled_tokens + other.pulled_tokens,
            self.pull_seconds + other.pull_seconds,
            _added(self.failures, other.failures),
            self.offers + other.offers,
            self.offered_blocks + other.offered_blocks,
            self.read_blocks + other.read_blocks,
            _added(self.refusals, other.refusals),
            self.leased_blocks + other.leased_blocks,
            _added(self.carriers, other.carriers),
            _added(self.passed_over, other.passed_over),
        )


def _added(mine: Reasons, more: Reasons) -> Reasons:
    counts = dict(mine)
    for reason, count in more:
        counts[reason] = counts.get(reason, 0) + count
    return tuple(sorted(counts.items()))


class Stats(NamedTuple):
    """Holds the engine's state and counters; every metric is derived from these."""

    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # computed or reused, of admitted prompts
    cached_tokens: int = 0  # reused
    generated_tokens: int = 0
    preemptions: int = 0
    busy_seconds: float = 0.0  # spent in steps
    grammars: int = 0  # compiled
    grammar_seconds: float = 0.0  # time spent on compiling grammars, in threads
    masks: int = 0  # bitmasks of allowed tokens that were computed
    mask_seconds: float = 0.0
    forced_tokens: int = 0  # generated without sampling, because a grammar left no choice
    computed_tokens: int = 0  # in all steps, of prompts and answers
    step_sizes: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)  # a histogram of steps by tokens, see STEP_SIZES
    adapter_slots: int = 0  # most adapters in memory at once
    adapter_bytes: int = 0  # memory of the loaded adapters
    adapters: tuple[AdapterRequests, ...] = ()  # those that requests name now
    drafts: tuple[DraftCounts, ...] = ()  # totals of every source, for ended requests
    adopted_blocks: int = 0  # adopted from the previous engine
    reused: tuple[tuple[str, int], ...] = ()  # cached_tokens by the tier that they came from (device, ram, disk, peer)
    host_blocks: int = 0  # blocks that host memory keeps
    host_places: int = 0  # that it has room for
    copied_in: int = 0  # blocks that came back from there
    copied_out: int = 0  # blocks that went there
    disk: DiskCounts = DiskCounts()
    in_line: int = 0  # requests that could run and find no room; others wait for a grammar or the end of a pause
    peers: PeerCounts = PeerCounts()
    uncached_tokens: int = 0  # prompt tokens still to be computed; counted if block events are recorded
    clients: int = 1  # clients that share the engine
    step_seconds: tuple[float, ...] = ()  # measured: of a prompt's token, of a pair of such, of a step that answers
    background: int = 0  # requests that may wait; counted if block events are recorded
    background_tokens: int = 0  # part of uncached_tokens in background requests
    prompt_seconds: float = 0.0  # part of busy_seconds spent on prompts
    prefilling: tuple[int, ...] = ()  # ids of running requests that have no token yet; of several clients, its own


class Hello(NamedTuple):
    """Introduces the engine to a client: it is the first message."""

    version: str
    pid: int
    model: str
    limits: Limits
    adapters: tuple[AdapterInfo, ...] = ()  # registered at the start
    unknown_fields: tuple[str, ...] = ()  # unknown fields of the model's config.json
    can_sleep: bool = False  # it can give its memory back and stay
    draft_tokens: int = 0  # the most that a step drafts for one request; 0: it drafts nothing
    epoch: int = 0  # epoch of its block events; 0: it records none
    address: str = ""  # where further clients can join; empty: it serves one client
    can_stand_by: bool = False  # another process can get ready to take over
    loads_late: bool = False  # the process loads its weights when it takes over
    device: str = ""  # whose memory it can share with other engines, by a name that they know it by, too
