"""Simulates a fleet on a virtual clock: a trace, replicas, and the routing of a real fleet."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from penstock.errors import InvalidRequest
from penstock.fleet.route import RoutingWeights
from penstock.fleet.scale import ServiceTargets
from penstock.fleet.timing import EngineTiming
from penstock.tools.sim.gateway import SimulatedGateway
from penstock.tools.sim.policies import ChosenReplica, GatewaySeat
from penstock.tools.sim.replica import SimulatedReplica, SimulatedRequest
from penstock.tools.traces import Trace, TracedRequest

TARGETS = ServiceTargets(ttft=2000.0, itl=50.0)


class FleetOptions(NamedTuple):
    """Describes a simulated fleet."""

    replicas: int
    policy: str
    timing: EngineTiming = EngineTiming()
    weights: RoutingWeights = RoutingWeights()
    host_factor: float = 0  # size of a replica's RAM tier, as a multiple of its device blocks
    targets: ServiceTargets = TARGETS  # limits of goodput
    gateways: int = 1  # share the requests in turn; each learns of the others' requests only from the replicas' reports
    contention: tuple[float, ...] = ()  # slowdown of steps while 1, 2, ... replicas compute; empty: none


class FleetReport(NamedTuple):
    """Holds the results of a simulation."""

    policy: str
    ttft_mean_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    reuse: float  # share of prompt tokens that were not computed
    goodput: float  # requests per second that met both targets


class FleetSimulation:
    """Runs one trace under one policy."""

    def __init__(self, trace: Trace, options: FleetOptions) -> None:
        if options.replicas < 1:
            raise InvalidRequest(f"a fleet has 1 replica or more; got {options.replicas}")
        size = trace.block_size
        self.requests: list[SimulatedRequest] = []  # in the order in which they were sent
        self._trace = trace
        self._options = options
        seats = [GatewaySeat(number, options.gateways) for number in range(options.gateways)]
        self._gateways = [
            SimulatedGateway(options.replicas, options.policy, options.timing, size, options.weights, seat)
            for seat in seats
        ]
        self._replicas = [SimulatedReplica(options.timing, size, options.host_factor) for _ in range(options.replicas)]
        self._received = [[0] * options.gateways for _ in self._replicas]  # requests of each gateway
        self._numbers = [0] * options.replicas  # next block event number of each replica
        self._ends: list[tuple[float, int]] = []  # heap; an entry that differs from the replica's own end is outdated

    def run(self) -> FleetReport:
        for id, traced in enumerate(self._trace.requests):
            if not self._replicas[0].fits(traced):
                raise InvalidRequest(
                    f"request {id} of the trace has {traced.prompt} + {traced.output} tokens, more than the KV cache "
                    f"of a replica holds ({self._options.timing.kv_tokens})"
                )
            self._advance(traced.arrival)
            gateway = id % len(self._gateways)
            chosen = self._gateways[gateway].take(id, traced, traced.arrival)
            if chosen is not None:
                self._send(gateway, id, traced, chosen, traced.arrival)
        self._advance(float("inf"))
        return self._sum_up()

    def _send(self, gateway: int, id: int, traced: TracedRequest, to: ChosenReplica, now: float) -> None:
        self._received[to.replica][gateway] += 1
        request, replica = SimulatedRequest(id, traced, to.pulled, now), self._replicas[to.replica]
        before = replica.end
        replica.submit(request, now, to.uncached)
        if replica.end != before:
            self._report(to.replica)
            self._share_machine(now)
        self.requests.append(request)

    def good_share(self) -> float:
        targets = self._options.targets
        good = sum(
            each.first_token - each.request.arrival <= targets.ttft and _itl(each) <= targets.itl
            for each in self.requests
        )
        return good / len(self.requests)

    def ttfts(self) -> list[float]:
        return sorted(each.first_token - each.request.arrival for each in self.requests)

    def imbalance(self) -> float:
        received = [sum(each) for each in self._received]
        return max(received) * len(received) / sum(received)

    def _sum_up(self) -> FleetReport:
        done, ttft = self.requests, self.ttfts()
        gaps = [_itl(each) for each in done if each.request.output > 1]
        seconds = max(each.finished for each in done) / 1000
        return FleetReport(
            policy=self._options.policy,
            ttft_mean_ms=sum(ttft) / len(ttft),
            ttft_p99_ms=ttft[min(int(0.99 * len(ttft)), len(ttft) - 1)],
            itl_mean_ms=sum(gaps) / len(gaps) if gaps else 0.0,
            reuse=sum(each.cached for each in done) / sum(each.request.prompt for each in done),
            goodput=self.good_share() * len(done) / seconds,
        )

    def _advance(self, until: float) -> None:
        """Runs every replica up to a time."""
        ends, replicas = self._ends, self._replicas
        while ends and ends[0][0] <= until:
            end, id = heappop(ends)
            if replicas[id].end == end:
                finished = replicas[id].advance()
                self._report(id)
                self._share_machine(end)
                self._send_next([each.id for each in finished], end)

    def _send_next(self, finished: list[int], now: float) -> None:
        """Sends waiting requests after a replica's report."""
        for number, gateway in enumerate(self._gateways):
            gateway.end(finished)
            while (turn := gateway.next(now)) is not None:
                self._send(number, *turn, now)

    def _share_machine(self, now: float) -> None:
        """Slows down replicas that share a machine, by the number that compute now."""
        if not self._options.contention:
            return
        busy = [id for id, replica in enumerate(self._replicas) if replica.end is not None]
        pace = self._options.contention[min(len(busy), len(self._options.contention)) - 1] if busy else 1.0
        for id in busy:
            replica = self._replicas[id]
            before = replica.end
            replica.set_pace(pace, now)
            if replica.end is not None and replica.end != before:
                heappush(self._ends, (replica.end, id))

    def _report(self, id: int) -> None:
        """Processes a replica's block events and load, as in a step's message, and the end of its run."""
        replica = self._replicas[id]
        changes, load, first = replica.cache.changes, replica.load(), self._numbers[id]
        for gateway, received in zip(self._gateways, self._received[id], strict=True):
            if changes:
                gateway.index.apply(id, 1, first, changes)
            gateway.ledger.report(id, load, received)
        if changes:
            self._numbers[id] += len(changes)
            replica.cache.changes = []
        if replica.end is not None:
            heappush(self._ends, (replica.end, id))


def simulate(trace: Trace, options: FleetOptions) -> FleetReport:
    return FleetSimulation(trace, options).run()


def _itl(request: SimulatedRequest) -> float:
    return (request.finished - request.first_token) / max(request.request.output - 1, 1)
