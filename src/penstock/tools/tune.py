"""Tries configurations of a fleet in the simulator, and finds the smallest that meets its targets."""

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

GOOD = 0.95  # share of the requests that have to meet both targets
TIER = 4.0  # blocks in the RAM tier for each on the device


class TunedFleet(NamedTuple):
    """Holds a configuration and what the simulator expects of it."""

    options: FleetOptions
    report: FleetReport
    good: float  # share of the requests that meet both targets

    @property
    def meets(self) -> bool:
        """Returns True if enough requests meet the targets."""
        return self.good >= GOOD

    def changed(self, plain: FleetOptions) -> dict[str, int]:
        """Returns the engine's options that differ from those of a plain fleet, with their values."""
        names = ("step_tokens", "prefill_budget", "max_rows")
        own, usual = self.options.timing, plain.timing
        return {name: getattr(own, name) for name in names if getattr(own, name) != getattr(usual, name)}


def plain_fleet(timing: EngineTiming, targets: ServiceTargets, tier: float = 0.0) -> FleetOptions:
    """Returns the fleet that no option changes. Its gateway reads blocks from other replicas where that is sooner, as
    every gateway does."""
    return FleetOptions(1, KV, timing, RoutingWeights(pull=True), tier, targets)


def variants(replicas: int, plain: FleetOptions) -> Iterator[FleetOptions]:
    """Yields configurations of so many replicas, the plainest first."""
    timing = plain.timing
    budgets = dict.fromkeys((timing.prefill_budget, 512, 2048))
    rows = dict.fromkeys((timing.max_rows, max(timing.max_rows // 4, 1)))
    tiers = dict.fromkeys((plain.host_factor, max(plain.host_factor, TIER)))
    for tier, most, budget in product(tiers, rows, budgets):
        tuned = timing._replace(max_rows=most, prefill_budget=min(budget, timing.step_tokens))
        yield plain._replace(replicas=replicas, timing=tuned, host_factor=tier)


def best_of(trace: Trace, replicas: int, plain: FleetOptions, found: Callable[[TunedFleet], None]) -> TunedFleet:
    """Returns the plainest configuration that meets the targets, or else the one that comes nearest. `found` hears of
    each that was tried."""
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
    """Returns the configuration with the fewest replicas that meets the targets; if none with up to `most` does, the
    nearest. The number is doubled until one does, and then bisected."""
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
