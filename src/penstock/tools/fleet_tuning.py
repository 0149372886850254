"""Searches the simulator for the smallest fleet configuration that meets its targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from penstock.fleet.route import RoutingWeights
from penstock.fleet.scale import ServiceTargets
from penstock.fleet.timing import EngineTiming
from penstock.tools.sim.policies import KV
from penstock.tools.sim.simulation import FleetOptions, FleetReport, FleetSimulation
from penstock.tools.traces import Trace

GOOD = 0.95  # required share of requests that meet both targets
TIER = 4.0  # RAM tier blocks per device block


class TunedFleet(NamedTuple):
    """Holds a configuration and its simulated results."""

    options: FleetOptions
    report: FleetReport
    good: float  # share of the requests that meet both targets

    @property
    def meets(self) -> bool:
        return self.good >= GOOD

    def changed(self, plain: FleetOptions) -> dict[str, int]:
        names = ("step_tokens", "prefill_budget", "max_rows")
        own, usual = self.options.timing, plain.timing
        return {name: getattr(own, name) for name in names if getattr(own, name) != getattr(usual, name)}


def plain_fleet(timing: EngineTiming, targets: ServiceTargets, tier: float = 0.0) -> FleetOptions:
    """Returns the default fleet. As in every fleet, its gateway pulls blocks from other replicas where that is
    faster.
    """
    return FleetOptions(1, KV, timing, RoutingWeights(pull=True), tier, targets)


def variants(replicas: int, plain: FleetOptions) -> Iterator[FleetOptions]:
    """Yields configurations with `replicas` replicas, the plainest first."""
    timing = plain.timing
    budgets = dict.fromkeys((timing.prefill_budget, 512, 2048))
    rows = dict.fromkeys((timing.max_rows, max(timing.max_rows // 4, 1)))
    tiers = dict.fromkeys((plain.host_factor, max(plain.host_factor, TIER)))
    for tier, most, budget in product(tiers, rows, budgets):
        tuned = timing._replace(max_rows=most, prefill_budget=min(budget, timing.step_tokens))
        yield plain._replace(replicas=replicas, timing=tuned, host_factor=tier)


def best_of(trace: Trace, replicas: int, plain: FleetOptions, found: Callable[[TunedFleet], None]) -> TunedFleet:
    """Returns the plainest configuration that meets the targets, or else the nearest. `found` receives each attempt."""
    best: TunedFleet | None = None
    for options in variants(replicas, plain):
        fleet = FleetSimulation(trace, options)
        tried = TunedFleet(options, fleet.run(), fleet.good_share())
        found(tried)
        if best is None or tried.good > best.good:
            best = tried
        if best.meets:
            break
    assert best is not None
    return best


def tune(trace: Trace, plain: FleetOptions, most: int, found: Callable[[TunedFleet], None]) -> TunedFleet:
    """Returns the configuration with the fewest replicas that meets the targets; if none up to `most` does, the
    nearest. The number is doubled until one does, and then bisected.
    """
    failed, replicas = 0, 1
    while not (best := best_of(trace, replicas, plain, found)).meets:
        if replicas == most:
            return best
        failed, replicas = replicas, min(2 * replicas, most)
    while replicas - failed > 1:
        middle = (failed + replicas) // 2
        tried = best_of(trace, middle, plain, found)
        if tried.meets:
            best, replicas = tried, middle
        else:
            failed = middle
    return best
