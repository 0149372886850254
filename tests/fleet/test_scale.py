"""Tests that the fleet grows with its load, shrinks late, and says why."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.scale import (
    FleetLoad,
    LoadMeter,
    ScaleBounds,
    Scaler,
    ServiceTargets,
    add_loads,
    forecast,
    replicas_needed,
    within_reach,
)
from penstock.fleet.timing import EngineTiming

TIMING, TARGETS = EngineTiming(), ServiceTargets(2000.0, 50.0)
LOADS = st.builds(
    FleetLoad,
    arrivals=st.floats(0, 50),
    uncached=st.floats(1, 20_000),
    tokens=st.floats(1, 30_000),
    output=st.floats(1, 1000),
)


@given(LOADS, st.integers(1, 30))
def test_one_more_replica_is_never_worse(load: FleetLoad, replicas: int) -> None:
    fewer, more = (forecast(load, count, TIMING) for count in (replicas, replicas + 1))
    assert more.ttft <= fewer.ttft * 1.0001
    assert more.itl <= fewer.itl * 1.0001


@given(LOADS, st.integers(1, 5), st.integers(0, 20))
def test_what_is_needed_is_within_bounds_and_no_more_than_needed(load: FleetLoad, least: int, more: int) -> None:
    bounds = ScaleBounds(least, least + more)
    needed = replicas_needed(load, TARGETS, TIMING, bounds)
    assert bounds.least <= needed <= bounds.most
    best, goal = forecast(load, bounds.most, TIMING), within_reach(load, TARGETS, TIMING, bounds)
    assert goal == TARGETS or not best.meets(TARGETS)  # what can be met is not given up
    assert (goal.ttft, goal.itl) >= TARGETS
    if needed > bounds.least:
        assert not forecast(load, needed - 1, TIMING).meets(goal)
    if needed < bounds.most:
        assert forecast(load, needed, TIMING).meets(goal)
    if best.meets(TARGETS):
        assert forecast(load, needed, TIMING).meets(TARGETS)


@given(st.lists(LOADS, min_size=2, max_size=20), st.integers(1, 8))
def test_a_scaler_grows_at_once_and_never_shrinks_twice_within_its_patience(loads: list[FleetLoad], begin: int) -> None:
    scaler, replicas, shrunk = Scaler(TIMING, TARGETS, ScaleBounds(1, 8, patience=100)), begin, -inf
    for minute, load in enumerate(loads):
        now = minute * 30.0
        decision = scaler.decide(load, replicas, now)
        assert decision.replicas >= replicas_needed(load, TARGETS, TIMING, ScaleBounds(1, 8)) or (
            decision.replicas >= replicas - 1
        )
        if decision.replicas < replicas:
            assert now - shrunk >= 100
            shrunk = now
        replicas = decision.replicas
        assert 1 <= replicas <= 8


def test_a_steady_load_settles_and_the_reason_has_the_figures() -> None:
    load = FleetLoad(arrivals=3.3, uncached=11_000, tokens=12_200, output=340)
    scaler = Scaler(TIMING, TARGETS, ScaleBounds(1, 16, patience=60))
    grown = scaler.decide(load, 1, 0.0)
    assert grown.replicas == replicas_needed(load, TARGETS, TIMING, ScaleBounds(1, 16)) > 1
    assert "3.3 requests/s" in grown.reason
    assert "with 1 cannot keep up" in grown.reason
    for seconds in range(0, 1000, 10):
        assert scaler.decide(load, grown.replicas, float(seconds)).replicas == grown.replicas
    low = load._replace(arrivals=0.3)
    assert "if that lasts 60 s more" in scaler.decide(low, 8, 0.0).reason
    assert scaler.decide(low, 8, 59.0).replicas == 8
    assert scaler.decide(low, 8, 60.0).replicas == 7
    assert scaler.decide(low, 7, 61.0).replicas == 7


def test_a_load_that_no_allowed_fleet_serves_is_said() -> None:
    decision = Scaler(TIMING, TARGETS, ScaleBounds(1, 2)).decide(FleetLoad(50, 20_000, 20_500, 1000), 2, 0.0)
    assert decision.replicas == 2
    assert decision.reason.endswith("missed, and more replicas are not allowed")


def test_a_target_that_no_number_of_replicas_meets_starts_none() -> None:
    """A prompt that takes 2.5 s alone comes twice a minute."""
    load, bounds = FleetLoad(1 / 30, 120_000, 120_100, 100), ScaleBounds(1, 8, patience=10)
    scaler = Scaler(TIMING, TARGETS, bounds)
    assert forecast(load, 8, TIMING).ttft > TARGETS.ttft
    decision = scaler.decide(load, 1, 0.0)
    assert decision.replicas < 4
    assert decision.reason.endswith("missed, and more replicas change little")
    replicas = 8
    for seconds in range(0, 200, 10):
        replicas = scaler.decide(load, replicas, float(seconds)).replicas
    assert replicas == decision.replicas


@given(st.floats(0.5, 20), st.integers(1, 5000), st.integers(1, 500))
def test_a_meter_finds_the_load_soon_and_forgets_it_late(rate: float, prompt: int, output: int) -> None:
    meter, now = LoadMeter(), 1000.0
    while now < 1040.0:
        meter.arrive(prompt, prompt // 2, now)
        meter.end(output, now)
        now += 1 / rate
    load = meter.load(0, now)
    assert 0.5 * rate < load.arrivals < 1.2 * rate + 0.2
    assert load[1:] == pytest.approx((prompt // 2, prompt + output / 2, output))
    assert meter.load(30, now).arrivals == pytest.approx(load.arrivals + 3)
    assert load.arrivals / 8 < meter.load(0, now + 60).arrivals < load.arrivals
    assert meter.load(0, now + 3600).arrivals < 0.01 * rate


@given(st.lists(LOADS, min_size=1, max_size=5))
def test_gateways_add_up(loads: list[FleetLoad]) -> None:
    total = add_loads(loads)
    assert total.arrivals == pytest.approx(sum(load.arrivals for load in loads))
    for at in range(1, 4):
        if total.arrivals:
            least, most = (pick(load[at] for load in loads) for pick in (min, max))
            assert least * 0.999 <= total[at] <= most * 1.001
