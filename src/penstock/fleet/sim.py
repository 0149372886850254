"""Simulates a fleet on a virtual clock: a trace, replicas, and the parts that route requests in a real fleet."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from penstock.errors import InvalidRequest
from penstock.fleet.index import BlockIndex
from penstock.fleet.ledger import Ledger
from penstock.fleet.policies import make_policy
from penstock.fleet.route import RoutedPrompt, RoutingWeights
from penstock.fleet.sim_replica import SimulatedReplica, SimulatedRequest
from penstock.fleet.timing import EngineTiming
from penstock.fleet.traces import Trace

TTFT_TARGET_MS = 2000.0
ITL_TARGET_MS = 50.0


class FleetOptions(NamedTuple):
    """Describes a simulated fleet."""

    replicas: int
    policy: str
    timing: EngineTiming = EngineTiming()
    weights: RoutingWeights = RoutingWeights()
    host_factor: float = 0  # blocks in a replica's RAM tier, as a multiple of those on its device


class FleetReport(NamedTuple):
    """Sums up a simulation."""

    policy: str
    ttft_mean_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    reuse: float  # share of the prompts' tokens that were not computed
    goodput: float  # requests per second that met both targets


class FleetSimulation:
    """Runs one trace under one policy."""

    def __init__(self, trace: Trace, options: FleetOptions) -> None:
        if options.replicas < 1:
            raise InvalidRequest(f"a fleet has 1 replica or more; got {options.replicas}")
        size = trace.block_size
        self._trace = trace
        self._options = options
        self._index = BlockIndex()
        self._ledger = Ledger()
        self._policy = make_policy(options.policy, options.timing, self._index, self._ledger, options.weights)
        self._replicas = [SimulatedReplica(options.timing, size, options.host_factor) for _ in range(options.replicas)]
        self._numbers = [0] * options.replicas  # of the next block event of each
        self._ends: list[tuple[float, int]] = []  # heap; an entry that is not the replica's own end is out of date
        for replica in range(options.replicas):
            self._ledger.join(replica)

    def run(self) -> FleetReport:
        """Runs the trace to its end and returns what came of it."""
        size, done = self._trace.block_size, []
        for id, traced in enumerate(self._trace.requests):
            if not self._replicas[0].fits(traced):
                raise InvalidRequest(
                    f"request {id} of the trace has {traced.prompt} + {traced.output} tokens, more than the KV cache "
                    f"of a replica holds ({self._options.timing.kv_tokens})"
                )
            self._advance(traced.arrival)
            to = self._policy.choose(RoutedPrompt(traced.hashes, traced.prompt, size), traced.arrival)
            request, replica = SimulatedRequest(id, traced, to.pulled), self._replicas[to.replica]
            before = replica.end
            replica.submit(request, traced.arrival, to.uncached)
            if replica.end != before:
                self._report(to.replica)
            done.append(request)
        self._advance(float("inf"))
        return _sum_up(self._options.policy, done)

    def _advance(self, until: float) -> None:
        """Runs every replica up to a time."""
        ends, replicas = self._ends, self._replicas
        while ends and ends[0][0] <= until:
            end, id = heappop(ends)
            if replicas[id].end == end:
                replicas[id].advance()
                self._report(id)

    def _report(self, id: int) -> None:
        """Takes a replica's block events and load, as a step's message carries them, and notes when its run ends."""
        replica = self._replicas[id]
        changes = replica.cache.changes
        if changes:
            self._index.apply(id, 1, self._numbers[id], changes)
            self._numbers[id] += len(changes)
            replica.cache.changes = []
        self._ledger.report(id, replica.load(), replica.received)
        if replica.end is not None:
            heappush(self._ends, (replica.end, id))


def simulate(trace: Trace, options: FleetOptions) -> FleetReport:
    """Runs a trace on a simulated fleet."""
    return FleetSimulation(trace, options).run()


def _sum_up(policy: str, done: list[SimulatedRequest]) -> FleetReport:
    ttft = sorted(each.first_token - each.request.arrival for each in done)
    gaps = [_itl(each) for each in done if each.request.output > 1]
    good = sum(
        each.first_token - each.request.arrival <= TTFT_TARGET_MS and _itl(each) <= ITL_TARGET_MS for each in done
    )
    seconds = max(each.finished for each in done) / 1000
    return FleetReport(
        policy=policy,
        ttft_mean_ms=sum(ttft) / len(ttft),
        ttft_p99_ms=ttft[min(int(0.99 * len(ttft)), len(ttft) - 1)],
        itl_mean_ms=sum(gaps) / len(gaps) if gaps else 0.0,
        reuse=sum(each.cached for each in done) / sum(each.request.prompt for each in done),
        goodput=good / seconds,
    )


def _itl(request: SimulatedRequest) -> float:
    """Returns the mean time between two tokens of an answer."""
    return (request.finished - request.first_token) / max(request.request.output - 1, 1)
