"""Compares ways to compute long prompts beside streams on a virtual clock: `python bench/split_clock.py`.

Each replica has a machine of its own and runs the engine's scheduler and policy. Its steps take as long as one thread
was measured to take for SmolLM2. The split rule is the one of gateways. Streams and prompts are as in fleet_split.py:
plain (engines know no target), itl (they know one), both (long prompts have a TTFT target, too).
"""

from __future__ import annotations

import argparse
import random
from heapq import heappop, heappush
from itertools import count, pairwise
from statistics import median
from typing import NamedTuple

from penstock.core import Scheduler, Sequence, SequenceParams
from penstock.core.policy import StandardPolicy
from penstock.core.step_cost import CostModel
from penstock.fleet.ledger import Load
from penstock.fleet.split import PromptToSplit, SplitRule
from penstock.fleet.timing import EngineTiming
from penstock.types import Claim, Limits, RowResult, StepResult, Tokens

PAIR, TOKEN, FIXED = 0.00039, 0.383, 3.0  # milliseconds of a prompt: of a pair of tokens, of a token, of a step
ANSWERS, ROW = 2.7, 0.93  # of a step that answers, and of each row
PULL = 0.026  # of a token that is read from another replica
LIMITS = Limits(8192, 64, 512, 16, 5000, vocab=49152, prefill_budget=192)
SHORT, ANSWER, LONG_ANSWER = 9, 64, 8  # tokens


class Asked(NamedTuple):
    """Is one request: a stream, a long prompt, or a long prompt that is computed for another replica."""

    sent: float
    kind: str
    arrivals: list[float]
    tokens: tuple[int, ...] = ()
    answered_by: int = -1


class Replica:
    """Runs an engine's scheduler; a step takes as long as its rows say."""

    def __init__(self, chatter: random.Random) -> None:
        self.costs = CostModel()
        self.scheduler = Scheduler(LIMITS, policy=StandardPolicy(LIMITS, self.costs))
        self.free_at = 0.0
        self.asked: dict[int, Asked] = {}
        self._random = chatter

    def load(self) -> Load:
        running, waiting = self.scheduler.running, self.scheduler.tenants.waiting
        lines = [seq for tenant in self.scheduler.tenants.in_line() for seq in tenant.line]
        queued = sum(max(seq.prompt_len - seq.planned, 0) for seq in (*running, *lines))
        rows = sum(seq.planned >= seq.prompt_len for seq in running)
        return Load(queued, queued, rows, 0, 0.0, waiting)

    def step(self, now: float) -> list[Asked]:
        """Runs one step from `now` on; returns the requests that have ended with it."""
        plan, sequences = self.scheduler.plan(), self.scheduler.sequences
        prompts = [row for row in plan.rows if row.start < sequences[row.seq].prompt_len]
        answering = len(plan.rows) - len(prompts)
        tokens = sum(row.count for row in prompts)
        took = PAIR * sum(row.count * (row.start + row.count / 2) for row in prompts) + TOKEN * tokens
        took += FIXED * bool(prompts) + (ANSWERS + ROW * answering) * bool(answering)
        took *= self._random.uniform(1.0, 1.1)
        self.costs.observe(plan.rows, took / 1000)
        self.free_at = now + took
        rows = tuple(RowResult(tokens=(50,) if row.sample else ()) for row in plan.rows)
        for event in self.scheduler.commit(plan, StepResult(plan.step, rows)):
            if isinstance(event, Tokens) and event.tokens:
                self.asked[event.seq].arrivals.append(self.free_at)
        ended = [id for id in self.asked if id not in self.scheduler.sequences]
        return [self.asked.pop(id) for id in ended]


class Fleet:
    """Sends streams and long prompts to replicas on one clock."""

    def __init__(self, way: str, options: argparse.Namespace) -> None:
        self._way, self._options = way, options
        self._random = random.Random(options.seed)
        self._replicas = [Replica(self._random) for _ in range(options.replicas)]
        self.rule = SplitRule()
        self._events: list[tuple[float, int, str, Asked | None]] = []
        self._order, self._ids = count(), count()
        self._known = self._make(options.tokens * 9 // 10 if options.hits else 0)
        self.done: list[Asked] = []

    def run(self) -> None:
        """Runs until all long prompts are answered."""
        options = self._options
        for number in range(options.prompts):
            self._at(options.every * 1000 * (number + 1), "long")
        for number in range(options.replicas if options.hits else 0):
            self._send(number, Asked(0.0, "known", []), self._known, 1, 0.0)
        for number in range(options.streams):
            self._at(10.0 * number, "stream")
        left = options.prompts
        while left:
            now, _, what, asked = heappop(self._events)
            if what == "step":
                left -= self._step(int(asked.sent) if asked else 0, now)
            elif what == "pulled" and asked is not None:
                self._send(asked.answered_by, asked, asked.tokens[-17:], LONG_ANSWER, now)
            else:
                self._arrive(what, now)

    def _at(self, when: float, what: str, asked: Asked | None = None) -> None:
        heappush(self._events, (when, next(self._order), what, asked))

    def _make(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(1000, 40_000) for _ in range(tokens))

    def _arrive(self, kind: str, now: float) -> None:
        long = kind == "long"
        tokens = self._known + self._make(self._options.tokens - len(self._known)) if long else self._make(SHORT)
        loads = {at: replica.load() for at, replica in enumerate(self._replicas)}
        duty = self.rule.on_duty(loads, now) if self._way != "plain" else frozenset()
        able = [at for at in loads if at not in duty]
        replica = min(able, key=lambda at: (loads[at].queued + self._uncached(at, tokens), loads[at].rows))
        asked = Asked(now, kind, [], tokens, replica)
        elsewhere = None
        if long and self._way != "plain":
            uncached = self._uncached(replica, tokens)
            ttft = self._options.ttft if self._way == "both" else None
            prompt = PromptToSplit(uncached, len(tokens) - uncached, ttft, self._options.itl)
            elsewhere = self.rule.decide(prompt, replica, loads, self._timing(loads), now)
        if elsewhere is None:
            self._send(replica, asked, tokens, LONG_ANSWER if long else ANSWER, now)
        else:
            self._send(elsewhere, asked._replace(kind="elsewhere"), tokens, 1, now)

    def _uncached(self, replica: int, tokens: tuple[int, ...]) -> int:
        cache, seq = self._replicas[replica].scheduler.cache, Sequence(-1, tokens, 1)
        return len(tokens) - min(len(cache.prefixes.match(seq)) * LIMITS.block_size, len(tokens) - 1)

    def _timing(self, loads: dict[int, Load]) -> EngineTiming:
        rows = max(load.rows for load in loads.values())
        return EngineTiming(
            (PAIR / 2, TOKEN, 0.0), (0.0, 0.0, ANSWERS + ROW * rows), 80_000, 512, 64, 192, 2 * PULL, context_ms=PAIR
        )

    def _send(self, to: int, asked: Asked, tokens: tuple[int, ...], output: int, now: float) -> None:
        replica, id = self._replicas[to], next(self._ids)
        idle = not replica.scheduler.sequences
        claim = Claim(itl=self._options.itl / 1000) if self._way != "plain" else Claim()
        replica.scheduler.add(Sequence(id, tokens, output, SequenceParams(claim=claim)))
        replica.asked[id] = asked
        if idle:
            self._at(max(now, replica.free_at), "step", Asked(to, "", []))

    def _step(self, number: int, now: float) -> int:
        """Runs a replica's step; returns how many long prompts it has answered."""
        replica, answered = self._replicas[number], 0
        ended = replica.step(now)
        if replica.scheduler.sequences:
            self._at(replica.free_at, "step", Asked(number, "", []))
        for asked in ended:
            if asked.kind == "elsewhere":
                asked.arrivals.clear()
                pull = PULL * len(asked.tokens)
                self._at(replica.free_at + pull, "pulled", asked._replace(kind="long"))
                continue
            self.done.append(asked)
            answered += asked.kind == "long"
            if asked.kind == "stream":
                self._at(replica.free_at, "stream")
        return answered


def measure(way: str, options: argparse.Namespace) -> tuple[float, float, float]:
    """Returns the p99 of the ITL, the median TTFT of long prompts and the tokens per second of one way."""
    fleet = Fleet(way, options)
    fleet.run()
    warm = options.warm * options.every * 1000
    streams = [each for each in fleet.done if each.kind == "stream" and each.sent > warm]
    prompts = [each for each in fleet.done if each.kind == "long" and each.sent > warm]
    gaps = sorted(late - early for each in streams for early, late in pairwise(each.arrivals))
    firsts = sorted(each.arrivals[0] - each.sent for each in prompts)
    waits = sorted(each.arrivals[0] - each.sent for each in streams)
    end = max(each.arrivals[-1] for each in fleet.done)
    made = sum(len(each.arrivals) for each in streams + prompts)
    rate = 1000 * (made + options.tokens * len(prompts)) / (end - warm)
    p99 = gaps[len(gaps) * 99 // 100]
    print(
        f"{way:6} ITL p50 {gaps[len(gaps) // 2]:.1f}, p99 {p99:.1f} ms; TTFT of long prompts {median(firsts):.0f} ms, "
        f"most {firsts[-1]:.0f}; of streams p99 {waits[len(waits) * 99 // 100]:.0f}; {rate:.0f} tokens/s, "
        f"{1000 * made / (end - warm):.0f} of answers; {dict(fleet.rule.decisions)}"
    )
    return p99, median(firsts), rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=3000, help="of a long prompt")
    parser.add_argument("--every", type=float, default=4.0, help="seconds from one long prompt to the next")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--warm", type=int, default=5, help="long prompts that do not count")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--itl", type=float, default=40.0, help="target in milliseconds")
    parser.add_argument("--ttft", type=float, default=4000.0, help="target in milliseconds")
    parser.add_argument("--hits", action="store_true", help="nine tenths of each long prompt are cached")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    plain, itl, both = (measure(way, options) for way in ("plain", "itl", "both"))
    for name, other in (("plain", plain), ("itl", itl)):
        ratios = [mine / its for mine, its in zip(both, other, strict=True)]
        print(f"both against {name}: ITL p99 {ratios[0]:.2f}x, TTFT {ratios[1]:.2f}x, tokens/s {ratios[2]:.2f}x")


if __name__ == "__main__":
    main()
