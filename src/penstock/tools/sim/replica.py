"""Simulates one replica on a virtual clock: its queue, its steps, its KV cache.

Steps without prefill or finished answers are skipped at once. An answer's blocks are reserved when the request is
admitted, so nothing is preempted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from heapq import heappop, heappush
from itertools import count, repeat
from math import ceil
from typing import NamedTuple

from penstock.fleet.holders import DEVICE, HOST, REMOVED, BlockChange
from penstock.fleet.ledger import Load
from penstock.fleet.timing import EngineTiming
from penstock.tools.traces import TracedRequest

_private = count(-1, -1)  # names of blocks that only one request can use


class SimulatedRequest:
    """Tracks one request through the simulation."""

    __slots__ = ("cached", "finished", "first_token", "id", "pulled", "remaining", "request", "sent", "taken")

    def __init__(self, id: int, request: TracedRequest, pulled: int = 0, sent: float | None = None) -> None:
        self.id = id
        self.request = request
        self.sent = request.arrival if sent is None else sent  # arrival time at its replica
        self.pulled = pulled  # leading blocks that are cached or pulled from another replica
        self.cached = 0  # tokens not computed
        self.remaining = request.prompt  # tokens to compute
        self.taken = 0  # blocks needed
        self.first_token = 0.0
        self.finished = 0.0


class SimulatedCache:
    """Counts the blocks in use and keeps the others, in the order of their last use. Evicted blocks move to a RAM
    tier.
    """

    def __init__(self, blocks: int, host_blocks: int) -> None:
        self._blocks = blocks
        self._host_blocks = host_blocks
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()
        self.active = 0  # blocks in use, named or not
        self.changes: list[BlockChange] = []  # since they were last taken

    def admit(self, hashes: tuple[int, ...], pulled: int, needed: int) -> tuple[int, int, int] | None:
        """Allocates a request's blocks. Returns the number of leading ones found on the device, found in host memory,
        and pulled; None if the blocks do not fit.
        """
        users, idle = self._users, self._idle
        device = shared = 0
        for block in hashes:
            if block in users:
                shared += 1
            elif block not in idle:
                break
            device += 1
        if self.active + needed - shared > self._blocks:
            return None
        for block in hashes[:device]:
            if block in users:
                users[block] += 1
            else:
                del idle[block]
                users[block] = 1
        host = device
        while host < len(hashes) and hashes[host] in self._host:
            self._host.move_to_end(hashes[host], last=False)  # a second copy is evicted first
            host += 1
        computed = hashes[device:]
        users.update(dict.fromkeys(computed, 1))
        self.changes.extend(zip(repeat(DEVICE), computed))
        self.active += needed - shared
        self._evict()
        return device, host - device, max(pulled - host, 0)

    def release(self, hashes: tuple[int, ...], needed: int, filled: int) -> None:
        """Frees a request's blocks, of which `filled` are full. The last ones are evicted first."""
        users, idle = self._users, self._idle
        for _ in range(filled - len(hashes)):
            idle[next(_private)] = None
        freed = needed - len(hashes)
        for block in reversed(hashes):
            left = users[block] - 1
            if left:
                users[block] = left
            else:
                del users[block]
                idle[block] = None
                freed += 1
        self.active -= freed
        self._evict()

    def _evict(self) -> None:
        excess = self.active + len(self._idle) - self._blocks
        evicted = [self._idle.popitem(last=False)[0] for _ in range(excess)]
        if self._host_blocks:
            self._demote([block for block in evicted if block >= 0])
        else:
            self.changes += [(REMOVED, block) for block in evicted if block >= 0]

    def _demote(self, blocks: list[int]) -> None:
        """Moves blocks to the RAM tier. Blocks evicted from there are gone, unless the device has them too."""
        host = self._host
        for block in blocks:
            self.changes.append((HOST, block))
            host[block] = None
            host.move_to_end(block)
        for _ in range(len(host) - self._host_blocks):
            oldest, _ = host.popitem(last=False)
            if oldest not in self._users and oldest not in self._idle:
                self.changes.append((REMOVED, oldest))


class _Run(NamedTuple):
    """Describes the current run of steps."""

    begin: float
    step_ms: float
    steps: int


class SimulatedReplica:
    """Runs requests in steps. `end` is the time at which the current run of steps ends; None: idle."""

    def __init__(self, timing: EngineTiming, block_size: int, host_factor: float = 0) -> None:
        self._timing = timing
        self._block_size = block_size
        self._blocks = timing.kv_tokens // block_size
        self.cache = SimulatedCache(self._blocks, int(self._blocks * host_factor))
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: deque[SimulatedRequest] = deque()
        self._rows: list[tuple[int, int, SimulatedRequest]] = []  # heap by the step that ends each request
        self._steps = 0
        self._run: _Run | None = None
        self._completed: list[SimulatedRequest] = []  # prompts that this step completes
        self._queued = 0
        self._pending = 0
        self._waiting_tokens = 0
        self._computing = False
        self._pace = 1.0
        self.end: float | None = None

    def fits(self, request: TracedRequest) -> bool:
        return ceil((request.prompt + request.output) / self._block_size) <= self._blocks

    def submit(self, request: SimulatedRequest, now: float, expected: int) -> None:
        """Adds a request with `expected` tokens to compute, interrupting a run of decode steps."""
        request.remaining = expected
        self._queued += expected
        self._pending += expected
        self._waiting_tokens += request.request.prompt
        self._waiting.append(request)
        run = self._run
        if run is None:
            self._begin(now)
        elif run.steps > 1:
            steps = min(max(ceil((now - run.begin) / run.step_ms), 1), run.steps)
            self._run = _Run(run.begin, run.step_ms, steps)
            self.end = run.begin + steps * run.step_ms

    def advance(self) -> list[SimulatedRequest]:
        """Ends the current run, begins the next one and returns the finished requests."""
        run, now = self._run, self.end
        assert run is not None
        assert now is not None
        self._steps += run.steps
        finished = []
        while self._rows and self._rows[0][0] <= self._steps:
            finished.append(heappop(self._rows)[2])
        for request in self._completed:
            request.first_token = now
            self._pending -= request.request.prompt - request.cached
            if request.request.output > 1:
                heappush(self._rows, (self._steps + request.request.output - 1, request.id, request))
            else:
                finished.append(request)
        self._completed.clear()
        for request in finished:
            request.finished = now
            traced = request.request
            self.cache.release(traced.hashes, request.taken, (traced.prompt + traced.output) // self._block_size)
        self._begin(now)
        return finished

    def set_pace(self, pace: float, now: float) -> None:
        """Multiplies step times by `pace`, including the rest of the current run."""
        run = self._run
        if run is not None and pace != self._pace:
            step = run.step_ms * pace / self._pace
            self._run = _Run(now - (now - run.begin) / run.step_ms * step, step, run.steps)
            self.end = self._run.begin + run.steps * step
        self._pace = pace

    def load(self) -> Load:
        kv_tokens = self.cache.active * self._block_size + self._waiting_tokens
        busy_until = self.end if self._computing and self.end is not None else 0.0
        waiting = len(self._waiting) + len(self._prefilling) + len(self._completed)
        return Load(self._queued, self._pending, len(self._rows), kv_tokens, busy_until, waiting)

    def _begin(self, now: float) -> None:
        """Plans the next step, or the decode steps up to the next event."""
        timing, extra_ms = self._timing, 0.0
        share = self.cache.active / self._blocks
        tokens = budget = timing.prompt_tokens(len(self._rows), share)
        while tokens > 0:
            if not self._prefilling:
                admitted = self._admit(now)
                if admitted is None:
                    break
                extra_ms += admitted
            request = self._prefilling[0]
            computed = min(tokens, request.remaining)
            extra_ms += timing.context_ms * computed * (request.request.prompt - request.remaining)
            request.remaining -= computed
            tokens -= computed
            self._queued -= computed
            if request.remaining == 0:
                self._completed.append(self._prefilling.popleft())
        computed = budget - tokens
        self._computing = computed > 0
        if not computed and not self._rows:
            self._run = self.end = None
            return
        step = timing.decode_ms(self.cache.active / self._blocks)
        if computed:
            step = timing.prefill_ms(computed) + extra_ms + (step if self._rows else 0.0)
        step *= self._pace
        steps = 1 if computed else self._rows[0][0] - self._steps
        self._run = _Run(now, step, steps)
        self.end = now + steps * step

    def _admit(self, now: float) -> float | None:
        """Starts the next prompt. Returns the milliseconds for which its step waits for blocks; None if none can start.
        Blocks from another replica have been in transit since the request was sent.
        """
        if not self._waiting or len(self._rows) + len(self._completed) >= self._timing.max_rows:
            return None
        request = self._waiting[0]
        traced = request.request
        needed = ceil((traced.prompt + traced.output) / self._block_size)
        taken = self.cache.admit(traced.hashes, request.pulled, needed)
        if taken is None:
            return None
        device, host, pulled = taken
        request.taken = needed
        request.cached = min((device + host + pulled) * self._block_size, traced.prompt - 1)
        unexpected = traced.prompt - request.cached - request.remaining
        self._queued += unexpected
        self._pending += unexpected
        self._waiting_tokens -= traced.prompt
        request.remaining += unexpected
        self._waiting.popleft()
        self._prefilling.append(request)
        timing = self._timing
        pull_ms = pulled * self._block_size * timing.pull_ms_per_token - (now - request.sent)
        return host * self._block_size * timing.host_ms_per_token + max(pull_ms, 0.0)
