"""Simulates a gateway: its knowledge of the replicas, its queue, and its routing."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.fleet.index import BlockIndex
from penstock.fleet.ledger import Ledger
from penstock.fleet.queue import GatewayQueue, has_room, without_full
from penstock.fleet.route import RoutedPrompt, RoutingWeights
from penstock.fleet.timing import EngineTiming
from penstock.tools.sim.policies import KV, ChosenReplica, GatewaySeat, make_policy
from penstock.tools.traces import TracedRequest
from penstock.types import Limits, Request, SamplingParams

SAMPLING = SamplingParams()
NOBODY: frozenset[int] = frozenset()


class SimulatedGateway:
    """Routes requests with a real gateway's knowledge: its own decisions, and the replicas' reports. With the policy
    kv, requests wait here while every replica is busy enough, as in GatewayLine; other policies stand for routers
    without a queue. Times are in milliseconds.
    """

    def __init__(
        self,
        replicas: int,
        policy: str,
        timing: EngineTiming,
        block_size: int,
        weights: RoutingWeights,
        seat: GatewaySeat,
    ) -> None:
        self.index = BlockIndex()
        self.ledger = Ledger()
        for replica in range(replicas):
            self.ledger.join(replica)
        self._policy = make_policy(policy, timing, self.index, self.ledger, weights, seat)
        self._timing = timing
        self._block_size = block_size
        self._queue = GatewayQueue(_limits(timing, block_size), _seconds_per_token(timing)) if policy == KV else None
        self._waiting: dict[int, TracedRequest] = {}

    def take(self, id: int, traced: TracedRequest, now: float) -> ChosenReplica | None:
        """Routes a new request; None: it waits."""
        queue = self._queue
        if queue is None:
            return self._choose(traced, now)
        queue.now = now / 1000
        request = Request(id, (), SAMPLING, traced.output)
        if (queue.is_next(request) and self._has_room(request)) or queue.is_first(request):
            chosen = self._choose(traced, now)
            queue.enter(request, chosen.uncached)
            return chosen
        queue.add(request, self._uncached(traced))
        self._waiting[id] = traced
        return None

    def next(self, now: float) -> tuple[int, TracedRequest, ChosenReplica] | None:
        """Returns the next waiting request with its id and replica; None if none waits, or no replica has room."""
        queue = self._queue
        if queue is None or not len(queue):
            return None
        queue.now = now / 1000
        if (request := queue.pop(self._has_room)) is None:
            return None
        traced = self._waiting.pop(request.id)
        return request.id, traced, self._choose(traced, now)

    def end(self, ids: Iterable[int]) -> None:
        """Removes answered requests. Unknown ids belong to other gateways."""
        if self._queue is not None:
            for id in ids:
                self._queue.abort(id)

    def _choose(self, traced: TracedRequest, now: float) -> ChosenReplica:
        prompt, ledger = RoutedPrompt(traced.hashes, traced.prompt, self._block_size), self.ledger
        if self._queue is None:
            return self._policy.choose(prompt, now, NOBODY)
        loads = {replica: ledger.load(replica) for replica in ledger.replicas()}
        return self._policy.choose(prompt, now, without_full(loads, NOBODY, self._timing))

    def _has_room(self, request: Request) -> bool:
        ledger, timing = self.ledger, self._timing
        return any(has_room(ledger.load(replica), timing) for replica in ledger.replicas())

    def _uncached(self, traced: TracedRequest) -> int:
        depth = max([depth for depth, _ in self.index.lookup(traced.hashes)], default=0)
        return traced.prompt - min(depth * self._block_size, traced.prompt - 1)


def _limits(timing: EngineTiming, block_size: int) -> Limits:
    rows, tokens = timing.max_rows, timing.step_tokens
    return Limits(timing.kv_tokens, rows, tokens, block_size, timing.kv_tokens // block_size, 1, timing.prefill_budget)


def _seconds_per_token(timing: EngineTiming) -> float:
    return timing.prefill_ms(timing.step_tokens) / timing.step_tokens / 1000
