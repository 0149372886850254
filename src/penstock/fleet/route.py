"""Chooses the replica that answers a request, by the cost of each candidate in milliseconds.

The cost is the time until the request's first token (queue, own prefill, blocks to pull), plus the harm to others:
answering rows wait while the prompt is computed, and a fuller KV cache evicts blocks. A prefix that many requests share
is worth having on one more replica: all its likely users share the cost of computing it there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from random import Random
from typing import NamedTuple

from penstock.fleet.index import BlockIndex, Holding, Predictions, PrefixHeat
from penstock.fleet.ledger import Ledger, load_of
from penstock.fleet.timing import EngineTiming

NOTHING = Holding(0, 0)
PRECISION = 64  # what replicas hold of a prompt is found out to one part in so many
OVERFLOW = 4.0  # a token that does not fit waits for an answer to end, which takes longer than computing it

USES = 2.0  # recent uses per holder before another replica should hold a prefix too

# total, replica, queue, prefill, pull, harm, memory, shared, uncached, cached, pulled: a plain tuple for each candidate
_Cost = tuple[float, int, float, float, float, float, float, float, int, int, int]


class RoutingWeights(NamedTuple):
    """Tunes the router. A weight of 1 counts a millisecond of others like one of the request's own."""

    candidates: int = 8  # candidates: this number of least loaded replicas, and the same number of best holders
    near: float = 0.05  # a replica is chosen at random among those that cost at most this share more than the best
    harm: float = 0.01  # cost of a millisecond of delay for one answering row
    later: float = 0.5  # cost of a millisecond of prefill for later requests
    memory: float = 0.1  # cost of a millisecond of recomputing evicted tokens
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
    shared: float  # not charged to this request: others will use the prefix that it computes
    uncached: int  # tokens to compute
    cached: int  # tokens that the replica holds
    pulled: int  # tokens to read from `source`
    source: int | None  # the replica to read blocks from
    next_best: tuple[int, float] | None  # the cheapest other replica and its cost

    def why(self, name: Callable[[int], str] = "replica {}".format) -> str:
        """Returns the decision in words, for a header and a trace. `name` returns a replica's name."""
        parts = [f"{self.queue:.0f} queue", f"{self.prefill:.0f} prefill of {self.uncached:,}"]
        if self.pulled and self.source is not None:
            parts.append(f"{self.pull:.0f} pull of {self.pulled:,} from {name(self.source)}")
        others = (("harm", self.harm), ("memory", self.memory))
        parts += [f"{value:.0f} {name}" for name, value in others if value >= 0.5]
        if self.shared >= 0.5:
            parts[-1] += f" - {self.shared:.0f} for others with this prefix"
        text = f"{name(self.replica)}: {self.total:.0f} ms = {' + '.join(parts)}"
        if self.cached:
            text += f"; {self.cached:,} cached"
        if self.next_best is None:
            return f"{text}; no other replica"
        return f"{text}; next: {name(self.next_best[0])}, {self.next_best[1]:.0f} ms"


class RoutedPrompt(NamedTuple):
    """A prompt to route."""

    hashes: Sequence[Hashable]  # chain hashes of the full blocks
    tokens: int
    block_size: int
    background: bool = False  # the request may wait


class Router:
    """Routes requests by an index of blocks and a ledger of loads that its owner keeps up to date."""

    def __init__(
        self,
        timing: EngineTiming,
        index: BlockIndex,
        ledger: Ledger,
        weights: RoutingWeights | None = None,
        seed: int | None = None,  # random seed; None: gateways choose independently
    ) -> None:
        self.gateways = 1  # gateways that share these replicas; set by the owner
        self._index = index
        self._ledger = ledger
        self._weights = weights or RoutingWeights()
        self._random = Random(seed)
        self._predictions = Predictions()
        self._heat = PrefixHeat()
        self.use(timing)

    def use(self, timing: EngineTiming) -> None:
        """Takes another timing: engines have been measured again."""
        self._timing = timing
        self._full_step_ms = timing.prefill_ms(timing.step_tokens)
        self._ms_per_token = self._full_step_ms / timing.step_tokens
        self._pulls = self._weights.pull and timing.pull_ms_per_token < self._ms_per_token

    def route(self, prompt: RoutedPrompt, now: float, avoid: AbstractSet[int] = frozenset()) -> Route:
        """Returns the route of a request and enters it in the ledger, and in the index for the time of one prefill. It
        goes to none of the replicas to `avoid`, if there are others.

        `now` is in milliseconds of any clock, the one that the ledger's reports have.
        """
        held = self._held(prompt, now)
        source = max(held, key=lambda replica: held[replica].held, default=None) if self._pulls else None
        candidates = self._ledger.least(self._weights.candidates)
        candidates += held.keys() - candidates
        if avoid:
            known = self._ledger.replicas() if avoid >= set(candidates) else candidates
            candidates = [replica for replica in known if replica not in avoid] or candidates
        costs = self._costs(candidates, prompt, held, source, now)
        costs.sort()
        near = costs[0][0] * (1 + self._weights.near)
        tied = 1
        while tied < len(costs) and costs[tied][0] <= near:
            tied += 1
        chosen = costs.pop(int(self._random.random() * tied))
        total, replica, queue, prefill, pull, harm, memory, shared, uncached, own, pulled = chosen
        self._ledger.sent(replica, load_of(uncached, prompt.tokens, prompt.background))
        self._predictions.add(replica, prompt.hashes, now + queue + prefill + pull)
        return Route(
            *(replica, total, queue, prefill, pull, harm, memory, shared, uncached, own, pulled),
            source if pulled else None,
            (costs[0][1], costs[0][0]) if costs else None,
        )

    def _held(self, prompt: RoutedPrompt, now: float) -> dict[int, Holding]:
        """Returns the blocks of a prompt that the least loaded and the best holding replicas have, or are about to
        have."""
        count, ledger = self._weights.candidates, self._ledger
        holders = self._index.lookup(prompt.hashes, within=len(prompt.hashes) // PRECISION + 1)
        held: dict[int, Holding] = {}
        if holders:
            for replica in ledger.least(count):
                if (holding := holders.of(replica)) is not None:
                    held[replica] = holding
            most = max([holding.held for holding in held.values()], default=0)
            for replica in holders.deepest(count, above=most):  # others hold no more and owe more
                if ledger.knows(replica) and (holding := holders.of(replica)) is not None:
                    held[replica] = holding
        self._predictions.expire(now)
        for replica, depth in self._predictions.depths(prompt.hashes, now).items():
            known = held.get(replica) or holders.of(replica) or NOTHING
            if known.device < depth and ledger.knows(replica):
                held[replica] = Holding(depth, max(depth, known.held))
        return held

    def _hot(self, prompt: RoutedPrompt, held: Mapping[int, Holding], now: float) -> tuple[int, float]:
        """Returns how many tokens of a prompt some replica has that others use too, and the share of their cost that is
        not this request's own on a replica that has them not."""
        depth = max([holding.held for holding in held.values()], default=0)
        if not depth:
            return 0, 0.0
        uses = self._heat.touch(prompt.hashes[depth - 1], now) * self.gateways
        holders = sum([holding.held == depth for holding in held.values()])
        own = USES * (holders + 1)
        return (depth * prompt.block_size, 1 - own / uses) if uses > own else (0, 0.0)

    def _costs(
        self,
        candidates: Sequence[int],
        prompt: RoutedPrompt,
        held: Mapping[int, Holding],
        source: int | None,
        now: float,
    ) -> list[_Cost]:
        """Returns the cost of each candidate. This loop takes most of a decision's time."""
        timing, weights, load, ms_per_token = self._timing, self._weights, self._ledger.load, self._ms_per_token
        prefill_ms, full_step_ms, step_tokens, kv_size = (
            timing.prefill_ms,
            self._full_step_ms,
            timing.step_tokens,
            timing.kv_tokens,
        )
        tokens, size, most = prompt.tokens, prompt.block_size, prompt.tokens - 1
        offered = 0 if source is None else min(held[source].held * size, most)
        hot_tokens, hot_share = self._hot(prompt, held, now)
        hot_tokens = min(hot_tokens, tokens)
        costs: list[_Cost] = []
        for replica in candidates:
            queued, _, rows, kv_tokens, busy_until = load(replica)[:5]
            own = pulled = 0
            pull = 0.0
            if (holding := held.get(replica)) is not None:
                own = min(holding.held * size, most)
                pull = (own - min(holding.device * size, most)) * timing.host_ms_per_token
            if offered > own:
                pulled = offered - own
                pull += pulled * timing.pull_ms_per_token
            uncached = tokens - own - pulled
            share = kv_tokens / kv_size if kv_tokens < kv_size else 1.0
            step = timing.decode_ms(share) if rows else 0.0
            before, part = divmod(queued, step_tokens)  # full steps, and tokens of the next
            after, rest = divmod(queued + uncached, step_tokens)
            ahead = before * full_step_ms + prefill_ms(part)
            queue = ahead + max(busy_until - now, step / 2) + step * before
            prefill = after * full_step_ms + prefill_ms(rest) - ahead + step * (after - before + (rest > 0))
            harm = (weights.harm * rows + weights.later) * prefill
            memory = weights.memory * share * (uncached + pulled) * ms_per_token
            over = kv_tokens + tokens - kv_size
            if over > 0:
                memory += over * ms_per_token * OVERFLOW
            shared = 0.0
            if hot_tokens > own + pulled:
                computed = min((hot_tokens - own - pulled) * ms_per_token, prefill)
                shared = hot_share * computed * (1 + weights.later)
            total = queue + prefill + pull + harm + memory - shared
            costs.append((total, replica, queue, prefill, pull, harm, memory, shared, uncached, own, pulled))
        return costs
