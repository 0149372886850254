"""Decides how many replicas a fleet needs for its load and its targets, and why.

The forecast takes one replica with its share of the requests: prompts are computed in turn, each answer adds a row, and
a step that computes prompts makes those rows wait. Growth is immediate; shrinking waits until the load has been low for
a while.

The module is pure: it has no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from typing import NamedTuple

from penstock.fleet.timing import EngineTiming

BUSY = 0.9  # share of a replica's time that prompts may take, and of its KV cache that requests may hold
ITERATIONS = 30  # after which the number of rows has settled, or never will
NEARLY = 1.5  # times what most replicas would reach: enough, where that misses a target
SOON, LONG = 10.0, 60.0  # seconds over which arrivals are averaged: a load that rises is seen soon, one that falls late
CATCH_UP = 10.0  # seconds in which those that wait are to be gone
FIRST_OUTPUT = 128.0  # tokens of an answer, until one has ended


class FleetLoad(NamedTuple):
    """Describes the requests of the last minutes, on average."""

    arrivals: float  # per second, at the whole fleet
    uncached: float  # prompt tokens of a request that are computed
    tokens: float  # mean KV tokens of a request: its prompt and half its answer
    output: float  # tokens of an answer


NO_LOAD = FleetLoad(0.0, 0.0, 0.0, 0.0)


class MeasuredLoad(NamedTuple):
    """A gateway's own load, and the speed of replicas."""

    load: FleetLoad
    timing: EngineTiming


class LoadMeter:
    """Averages the requests of a gateway. Times are in seconds."""

    def __init__(self) -> None:
        self._at = 0.0
        self._soon = self._long = 0.0  # arrivals, decayed
        self._uncached = self._tokens = 0.0  # decayed sums
        self._ended = self._output = 0.0  # answers and their tokens, decayed

    def arrive(self, tokens: int, uncached: int, now: float) -> None:
        self._decay(now)
        self._soon += 1
        self._long += 1
        self._tokens += tokens
        self._uncached += uncached

    def end(self, output: int, now: float) -> None:
        self._decay(now)
        self._ended += 1
        self._output += output

    def load(self, waiting: int, now: float) -> FleetLoad:
        self._decay(now)
        arrivals = max(self._soon / SOON, self._long / LONG) + waiting / CATCH_UP
        if self._long < 1e-3:
            return NO_LOAD._replace(arrivals=arrivals)
        output = self._output / self._ended if self._ended > 1e-3 else FIRST_OUTPUT
        return FleetLoad(arrivals, self._uncached / self._long, self._tokens / self._long + output / 2, output)

    def _decay(self, now: float) -> None:
        passed, self._at = max(now - self._at, 0.0), max(now, self._at)
        soon, long = exp(-passed / SOON), exp(-passed / LONG)
        self._soon *= soon
        self._long, self._tokens, self._uncached = long * self._long, long * self._tokens, long * self._uncached
        self._ended, self._output = long * self._ended, long * self._output


def add_loads(loads: Sequence[FleetLoad]) -> FleetLoad:
    """Returns the load of several gateways together: their arrivals, and the mean of their requests."""
    arrivals = sum(load.arrivals for load in loads)
    if not arrivals:
        return NO_LOAD
    parts = (sum(load.arrivals * load[at] for load in loads) / arrivals for at in range(1, len(NO_LOAD)))
    return FleetLoad(arrivals, *parts)


class ServiceTargets(NamedTuple):
    """Says how soon tokens have to come, in milliseconds."""

    ttft: float
    itl: float


class ScaleBounds(NamedTuple):
    """Limits what the scaler does."""

    least: int = 1
    most: int = 8
    patience: float = 300.0  # seconds for which fewer replicas have to suffice before one leaves
    slack: float = 0.8  # share of the targets that fewer replicas have to meet


class ServiceForecast(NamedTuple):
    """Expected latencies in milliseconds; infinite: the replicas cannot keep up."""

    ttft: float
    itl: float

    def meets(self, targets: ServiceTargets, share: float = 1.0) -> bool:
        return self.ttft <= share * targets.ttft and self.itl <= share * targets.itl


class ScaleDecision(NamedTuple):
    """Says how many replicas there should be."""

    replicas: int
    reason: str


def forecast(load: FleetLoad, replicas: int, timing: EngineTiming) -> ServiceForecast:
    arrivals = load.arrivals / replicas / 1000  # per millisecond
    alone = timing.prompt_ms(load.uncached)
    busy = arrivals * alone
    itl = timing.decode_ms(0.0)
    for _ in range(ITERATIONS):
        rows = arrivals * load.output * itl
        share = rows * load.tokens / timing.kv_tokens
        if busy >= BUSY or share >= BUSY or rows > timing.max_rows:
            return ServiceForecast(inf, inf)
        itl = timing.decode_ms(share) / (1 - busy)
    queue = busy * alone / (2 * (1 - busy))  # M/D/1 queue
    return ServiceForecast(queue + alone + itl * min(rows, 1), itl)


def within_reach(load: FleetLoad, targets: ServiceTargets, timing: EngineTiming, bounds: ScaleBounds) -> ServiceTargets:
    """Returns targets that can be met: if the largest fleet misses one, nearly its result. More replicas would not help
    if a prompt by itself takes longer than its target."""
    best = forecast(load, bounds.most, timing)
    if best.ttft == inf:
        return targets
    ttft, itl = (NEARLY * can if can > wanted else wanted for can, wanted in zip(best, targets, strict=True))
    return ServiceTargets(ttft, itl)


def replicas_needed(load: FleetLoad, targets: ServiceTargets, timing: EngineTiming, bounds: ScaleBounds) -> int:
    """Returns the fewest replicas, within the bounds, that meet the targets as far as they can be met; the most allowed
    if they cannot keep up."""
    fleet, goal = range(bounds.least, bounds.most + 1), within_reach(load, targets, timing, bounds)
    return next((count for count in fleet if forecast(load, count, timing).meets(goal)), bounds.most)


class Scaler:
    """Follows the load and decides with hysteresis."""

    def __init__(self, timing: EngineTiming, targets: ServiceTargets, bounds: ScaleBounds) -> None:
        self.timing = timing  # a replica's timing, updated as it is measured
        self._bounds = bounds
        self._targets = targets
        self._low_since: float | None = None  # when fewer replicas began to suffice

    def decide(self, load: FleetLoad, replicas: int, now: float) -> ScaleDecision:
        """Returns how many replicas there should be where there are `replicas` now. `now` is in seconds."""
        bounds, timing = self._bounds, self.timing
        needed = replicas_needed(load, self._targets, timing, bounds)
        if needed > replicas or replicas > bounds.most:
            self._low_since = None
            return ScaleDecision(needed, self._why(load, replicas, needed))
        fewer, goal = replicas - 1, within_reach(load, self._targets, timing, bounds)
        if fewer < bounds.least or not forecast(load, fewer, timing).meets(goal, bounds.slack):
            self._low_since = None
            return ScaleDecision(replicas, self._why(load, replicas, replicas))
        if self._low_since is None:
            self._low_since = now
        if now - self._low_since < bounds.patience:
            left = bounds.patience - (now - self._low_since)
            return ScaleDecision(
                replicas, f"{self._why(load, fewer, replicas)}; {fewer} if that lasts {left:.0f} s more"
            )
        self._low_since = None
        return ScaleDecision(fewer, self._why(load, replicas, fewer))

    def _why(self, load: FleetLoad, before: int, after: int) -> str:
        targets = self._targets
        text = (
            f"{load.arrivals:.3g} requests/s of {load.uncached:,.0f} uncached and {load.output:,.0f} output tokens: "
            f"{self._expected(load, after)}"
        )
        if before != after and before > 0:
            text += f", with {self._expected(load, before)}"
        wanted = ((targets.ttft, "TTFT"), (targets.itl, "ITL"))
        named = [f"{name} {target:,.0f} ms" for target, name in wanted if target < inf]
        text += f"; targets {' and '.join(named)}" if named else "; no targets"
        if not forecast(load, after, self.timing).meets(targets):
            missed = "more replicas are not allowed" if after == self._bounds.most else "more replicas change little"
            text += f"; missed, and {missed}"
        return text

    def _expected(self, load: FleetLoad, replicas: int) -> str:
        expected = forecast(load, replicas, self.timing)
        if expected.ttft == inf:
            return f"{replicas} cannot keep up"
        return f"{replicas} give TTFT {expected.ttft:,.0f} and ITL {expected.itl:.0f} ms"
