"""Implements several routing policies, to compare them in the simulator."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from itertools import count
from random import Random
from typing import NamedTuple, Protocol

from penstock.errors import InvalidRequest
from penstock.fleet.index import BlockIndex
from penstock.fleet.ledger import Ledger, load_of
from penstock.fleet.route import RoutedPrompt, Router, RoutingWeights
from penstock.fleet.timing import EngineTiming

KV = "kv"
NAMES = (KV, "round-robin", "least-loaded", "dynamo")


class ChosenReplica(NamedTuple):
    """Holds a routing decision."""

    replica: int
    uncached: int  # tokens expected to be computed there
    pulled: int = 0  # leading blocks that are cached there or pulled from another replica


class GatewaySeat(NamedTuple):
    """Identifies a gateway among several. Randomized policies use it as a seed."""

    number: int = 0
    gateways: int = 1


class RoutingPolicy(Protocol):
    """Chooses the replica of a request."""

    def choose(self, prompt: RoutedPrompt, now: float, avoid: AbstractSet[int]) -> ChosenReplica:
        """Routes a request and enters it in the ledger. The replicas in `avoid` have no free row; only the fleet's own
        router heeds that.
        """


class KvPolicy:
    """Chooses by the router's cost in milliseconds."""

    def __init__(self, router: Router, gateways: int = 1) -> None:
        self._router = router
        router.gateways = gateways

    def choose(self, prompt: RoutedPrompt, now: float, avoid: AbstractSet[int]) -> ChosenReplica:
        route = self._router.route(prompt, now, avoid)
        blocks = (route.cached + route.pulled + 1) // prompt.block_size if route.pulled else 0
        return ChosenReplica(route.replica, route.uncached, blocks)


class RoundRobin:
    """Chooses the replicas in turn."""

    def __init__(self, ledger: Ledger, first: int = 0) -> None:
        self._ledger = ledger
        self._next = count(first)

    def choose(self, prompt: RoutedPrompt, now: float, avoid: AbstractSet[int]) -> ChosenReplica:
        replica = next(self._next) % len(self._ledger)
        self._ledger.sent(replica, load_of(prompt.tokens, prompt.tokens))
        return ChosenReplica(replica, prompt.tokens)


class LeastLoaded:
    """Chooses the replica with the least outstanding work, ignoring caches."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def choose(self, prompt: RoutedPrompt, now: float, avoid: AbstractSet[int]) -> ChosenReplica:
        replica = self._ledger.least(1)[0]
        self._ledger.sent(replica, load_of(prompt.tokens, prompt.tokens))
        return ChosenReplica(replica, prompt.tokens)


class DynamoCost:
    """Chooses by the default cost of Dynamo's router, in blocks: queued and new uncached prefill, plus the blocks of
    active requests. The lowest cost wins; ties are broken at random.
    """

    def __init__(self, index: BlockIndex, ledger: Ledger, seed: int = 0) -> None:
        self._index = index
        self._ledger = ledger
        self._random = Random(seed)

    def choose(self, prompt: RoutedPrompt, now: float, avoid: AbstractSet[int]) -> ChosenReplica:
        size = prompt.block_size
        held = self._index.lookup(prompt.hashes)
        best, costs = float("inf"), []
        for replica in self._ledger.replicas():
            load, holding = self._ledger.load(replica), held.of(replica)
            device, host = (holding.device, holding.held - holding.device) if holding else (0, 0)
            credit = device + 0.75 * host
            blocks = prompt.tokens / size
            cost = max(load.pending / size + blocks - credit, 0) + load.kv_tokens / size + blocks - device
            costs.append((cost, replica, prompt.tokens - min((device + host) * size, prompt.tokens - 1)))
            best = min(best, cost)
        _, replica, uncached = self._random.choice([each for each in costs if each[0] == best])
        self._ledger.sent(replica, load_of(uncached, prompt.tokens))
        return ChosenReplica(replica, uncached)


def make_policy(
    name: str, timing: EngineTiming, index: BlockIndex, ledger: Ledger, weights: RoutingWeights, seat: GatewaySeat
) -> RoutingPolicy:
    if name == KV:
        return KvPolicy(Router(timing, index, ledger, weights, seat.number), seat.gateways)
    if name == "round-robin":
        return RoundRobin(ledger, seat.number)
    if name == "least-loaded":
        return LeastLoaded(ledger)
    if name == "dynamo":
        return DynamoCost(index, ledger, seat.number)
    raise InvalidRequest(f"there is no routing policy {name!r}; the policies are {', '.join(NAMES)}")
