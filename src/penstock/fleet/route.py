"""Chooses the replica that answers a request: what every candidate would cost, in milliseconds.

The cost is the time until the request's first token (queue, own prefill, blocks to pull), plus the harm to others: rows
that answer wait while the prompt is computed, and a fuller KV cache evicts what others need.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import itemgetter
from random import Random
from typing import NamedTuple

from penstock.fleet.index import BlockIndex, Holding, Predictions
from penstock.fleet.ledger import Ledger, load_of
from penstock.fleet.timing import EngineTiming

NOTHING = Holding(0, 0)
OVERFLOW = 4.0  # a token that does not fit waits for an answer to end, which takes longer than computing it

# total, replica, queue, prefill, pull, harm, memory, uncached, cached, pulled: a plain tuple, one for each candidate
_Cost = tuple[float, int, float, float, float, float, float, int, int, int]


class RoutingWeights(NamedTuple):
    """Tunes the router. A weight of 1 counts a millisecond of others like one of the request's own."""

    candidates: int = 8  # so many least loaded replicas are considered, and as many that hold most of the prompt
    near: float = 0.05  # a replica is chosen at random among those that cost at most this share more than the best
    harm: float = 0.01  # of a millisecond in which a row that answers has to wait
    later: float = 0.5  # of a millisecond of prefill, for those who will come while it lasts
    memory: float = 0.1  # of the milliseconds to compute again the tokens that are evicted
    pull: bool = False  # whether blocks may be read from another replica, where that is faster than to compute them


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


class RoutedPrompt(NamedTuple):
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
        self._ms_per_token = timing.prefill_ms(timing.step_tokens) / timing.step_tokens
        self._pulls = self._weights.pull and timing.pull_ms_per_token < self._ms_per_token

    def route(self, prompt: RoutedPrompt, now: float) -> Route:
        """Returns the route of a request and enters it in the ledger, and in the index for the time of one prefill.

        `now` is in milliseconds of any clock, the one that the ledger's reports have.
        """
        held = self._held(prompt, now)
        source = max(held, key=lambda replica: held[replica].held, default=None) if self._pulls else None
        candidates = self._ledger.least(self._weights.candidates)
        candidates += held.keys() - candidates
        cost = self._cost
        costs = [cost(replica, prompt, held, source, now) for replica in candidates]
        best = min(costs)
        near = best[0] * (1 + self._weights.near)
        tied = [each for each in costs if each[0] <= near]
        chosen = self._random.choice(tied) if len(tied) > 1 else best
        others = [(each[1], each[0]) for each in costs if each is not chosen]
        total, replica, queue, prefill, pull, harm, memory, uncached, own, pulled = chosen
        self._ledger.sent(replica, load_of(uncached, prompt.tokens))
        self._predictions.add(replica, prompt.hashes, now + queue + prefill + pull)
        return Route(
            *(replica, total, queue, prefill, pull, harm, memory, uncached, own, pulled),
            source=source if pulled else None,
            next_best=min(others, key=itemgetter(1)) if others else None,
        )

    def _held(self, prompt: RoutedPrompt, now: float) -> dict[int, Holding]:
        """Returns what the least loaded replicas and those that hold most have of a prompt, or are about to have."""
        count, ledger = self._weights.candidates, self._ledger
        holders = self._index.lookup(prompt.hashes)
        held = {}
        if holders:
            for replica in {*ledger.least(count), *holders.deepest(count)}:
                if (holding := holders.of(replica)) is not None and ledger.knows(replica):
                    held[replica] = holding
        self._predictions.expire(now)
        for replica, depth in self._predictions.depths(prompt.hashes, now).items():
            known = held.get(replica) or holders.of(replica) or NOTHING
            if known.device < depth and ledger.knows(replica):
                held[replica] = Holding(depth, max(depth, known.held))
        return held

    def _cost(
        self, replica: int, prompt: RoutedPrompt, held: dict[int, Holding], source: int | None, now: float
    ) -> _Cost:
        timing, weights, tokens = self._timing, self._weights, prompt.tokens
        queued, _, rows, kv_tokens, busy_until = self._ledger.load(replica)
        own = loaded = pulled = 0
        if held:
            size, most = prompt.block_size, tokens - 1
            if (holding := held.get(replica)) is not None:
                own = min(holding.held * size, most)
                loaded = own - min(holding.device * size, most)
            if source is not None and source != replica:
                pulled = max(min(held[source].held * size, most) - own, 0)
        pull = pulled * timing.pull_ms_per_token + loaded * timing.host_ms_per_token
        uncached = tokens - own - pulled
        share = min(kv_tokens / timing.kv_tokens, 1.0)
        step = timing.decode_ms(share) if rows else 0.0
        before = queued // timing.step_tokens  # full steps
        steps = (queued + uncached - 1) // timing.step_tokens - before + 1
        ahead = timing.prompt_ms(queued) if queued else 0.0
        queue = ahead + max(busy_until - now, step / 2) + step * before
        prefill = timing.prompt_ms(queued + uncached) - ahead + step * steps
        harm = (weights.harm * rows + weights.later) * prefill
        memory = weights.memory * share * (uncached + pulled) * self._ms_per_token
        over = kv_tokens + tokens - timing.kv_tokens
        if over > 0:
            memory += over * self._ms_per_token * OVERFLOW
        total = queue + prefill + pull + harm + memory
        return total, replica, queue, prefill, pull, harm, memory, uncached, own, pulled
