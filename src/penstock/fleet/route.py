"""Chooses the replica that answers a request: what every candidate would cost, in milliseconds.

The cost is the time until the request's first token (queue, own prefill, blocks to pull), plus the harm to others: rows
that answer wait while the prompt is computed, and a fuller KV cache evicts what others need.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from random import Random
from typing import NamedTuple

from penstock.fleet.index import BlockIndex, Holding, Predictions
from penstock.fleet.ledger import Ledger, load_of
from penstock.fleet.timing import EngineTiming


class RoutingWeights(NamedTuple):
    """Tunes the router. A weight of 1 counts a millisecond of others like one of the request's own."""

    candidates: int = 16  # least loaded replicas that are considered beside those that hold a part of the prompt
    near: float = 0.05  # a replica is chosen at random among those that cost at most this share more than the best
    harm: float = 0.05  # of a millisecond in which a row that answers has to wait
    memory: float = 0.5  # of the milliseconds to compute again the tokens that are evicted
    pull: bool = False  # whether blocks may be read from another replica


class Route(NamedTuple):
    """Says which replica answers a request, and what each part of its cost is, in milliseconds."""

    replica: int
    total: float
    queue: float
    prefill: float
    pull: float
    harm: float
    memory: float
    uncached: int  # tokens to compute
    cached: int  # tokens that the replica holds
    pulled: int  # tokens to read from `source`
    source: int | None  # the replica to read blocks from
    next_best: tuple[int, float] | None  # the cheapest other replica and its cost

    def why(self) -> str:
        """Returns the decision in words, for a header and a trace."""
        parts = [f"{self.queue:.0f} queue", f"{self.prefill:.0f} prefill of {self.uncached:,}"]
        if self.pulled:
            parts.append(f"{self.pull:.0f} pull of {self.pulled:,} from {self.source}")
        others = (("harm", self.harm), ("memory", self.memory))
        parts += [f"{value:.0f} {name}" for name, value in others if value >= 0.5]
        text = f"replica {self.replica}: {self.total:.0f} ms = {' + '.join(parts)}"
        if self.cached:
            text += f"; {self.cached:,} cached"
        if self.next_best is None:
            return f"{text}; no other replica"
        return f"{text}; next: replica {self.next_best[0]}, {self.next_best[1]:.0f} ms"


class Prompt(NamedTuple):
    """Describes what is to be routed."""

    hashes: Sequence[Hashable]  # chain hashes of the full blocks
    tokens: int
    block_size: int


class Router:
    """Routes requests by an index of blocks and a ledger of loads that its owner keeps up to date."""

    def __init__(
        self,
        timing: EngineTiming,
        index: BlockIndex,
        ledger: Ledger,
        weights: RoutingWeights | None = None,
        seed: int = 0,
    ) -> None:
        self._timing = timing
        self._index = index
        self._ledger = ledger
        self._weights = weights or RoutingWeights()
        self._random = Random(seed)
        self._predictions = Predictions()
        self._full_step_ms = timing.prefill_ms(timing.step_tokens)

    def route(self, prompt: Prompt, now: float) -> Route:
        """Returns the route of a request and enters it in the ledger, and in the index for the time of one prefill.

        `now` is in milliseconds of any clock; it only says when predictions end.
        """
        held = self._held(prompt, now)
        source = max(held, key=lambda replica: held[replica].held, default=None) if self._weights.pull else None
        candidates = dict.fromkeys(self._ledger.least(self._weights.candidates))
        candidates.update(dict.fromkeys(held))
        costs = [self._cost(replica, prompt, held, source, now) for replica in candidates]
        costs.sort(key=_total)
        near = costs[0].total * (1 + self._weights.near)
        count = 1
        while count < len(costs) and costs[count].total <= near:
            count += 1
        chosen = costs[self._random.randrange(count)] if count > 1 else costs[0]
        if len(costs) > 1:
            other = costs[1] if chosen is costs[0] else costs[0]
            chosen = chosen._replace(next_best=(other.replica, other.total))
        self._ledger.sent(chosen.replica, load_of(chosen.uncached, prompt.tokens))
        self._predictions.add(chosen.replica, prompt.hashes, now + chosen.queue + chosen.prefill + chosen.pull)
        return chosen

    def _held(self, prompt: Prompt, now: float) -> dict[int, Holding]:
        """Returns what replicas hold or are about to hold, of those that may be chosen."""
        held = self._index.holdings(prompt.hashes)
        self._predictions.expire(now)
        for replica, depth in self._predictions.depths(prompt.hashes, now).items():
            known = held.get(replica)
            if known is None or known.device < depth:
                held[replica] = Holding(depth, max(depth, known.held if known else 0))
        return {replica: holding for replica, holding in held.items() if self._ledger.knows(replica)}

    def _cost(self, replica: int, prompt: Prompt, held: dict[int, Holding], source: int | None, now: float) -> Route:
        timing, weights, load = self._timing, self._weights, self._ledger.load(replica)
        holding = held.get(replica)
        size, most = prompt.block_size, prompt.tokens - 1
        own = min(holding.held * size, most) if holding else 0
        loaded = own - min(holding.device * size, most) if holding else 0
        pulled = 0
        if source is not None and source != replica:
            pulled = max(min(held[source].held * size, most) - own, 0)
        pull = pulled * timing.pull_ms_per_token + loaded * timing.host_ms_per_token
        uncached = prompt.tokens - own - pulled
        share = min(load.kv_tokens / timing.kv_tokens, 1.0)
        per_token = self._full_step_ms / timing.step_tokens
        step = timing.decode_ms(share) if load.rows else 0.0
        ahead = timing.prompt_ms(load.queued)
        queue = ahead + max(load.busy_until - now, step / 2) + step * (load.queued // timing.step_tokens)
        steps = (load.queued + uncached - 1) // timing.step_tokens - load.queued // timing.step_tokens + 1
        prefill = timing.prompt_ms(load.queued + uncached) - ahead + step * steps
        harm = weights.harm * load.rows * prefill
        memory = weights.memory * share * (uncached + pulled) * per_token
        over = load.kv_tokens + prompt.tokens - timing.kv_tokens
        if over > 0:
            memory += over * per_token * OVERFLOW
        total = queue + prefill + pull + harm + memory
        return Route(
            replica, total, queue, prefill, pull, harm, memory, uncached, own, pulled, source if pulled else None, None
        )


OVERFLOW = 4.0  # a token that does not fit waits for an answer to end, which takes longer than computing it


def _total(route: Route) -> float:
    return route.total
