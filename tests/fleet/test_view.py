"""What a gateway believes of its replicas: times that engines have measured, sums that never go back, and the salts
that engines use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.backend.fake import FakeBackend
from penstock.core.hashing import chain
from penstock.engine.assemble import assemble
from penstock.engine.chain_hash import chain_hash
from penstock.engine.lora.feature import AdapterControl
from penstock.fleet.calibration import TimingFit
from penstock.fleet.directory import ReplicaInfo
from penstock.fleet.totals import FleetTotals
from penstock.fleet.view import FleetView, salt_of
from penstock.types import (
    AdapterUse,
    BlockEvent,
    BlockSnapshot,
    BlockStored,
    Limits,
    Request,
    SamplingParams,
    Stats,
    WeightState,
)
from tests.engine.test_adapters import engine_with
from tests.engine.test_adapters import folder as folder

LIMITS = Limits(max_len=256, max_rows=8, step_tokens=64, block_size=4, num_blocks=128, vocab=100)


def test_timing_follows_what_engines_measure() -> None:
    fit = TimingFit(LIMITS)
    first = fit.timing
    assert not fit.observe((0.0, 0.0, 0.0))  # nothing is known yet
    assert not fit.observe(())
    assert fit.observe((2e-3, 1e-6, 0.01))
    assert fit.timing.prefill_ms(10) == pytest.approx(10 * 2 + 10 * 10 * 1e-3 / 2)
    assert fit.timing.decode_ms(0.5) == pytest.approx(10)
    assert fit.timing.kv_tokens == 512 != first.prefill
    assert not fit.observe((2.01e-3, 1e-6, 0.01))
    assert not fit.observe((1e6, 1e-6, 0.01))  # a clock that jumped
    for _ in range(200):
        fit.observe((4e-3, 1e-6, 0.01))
    assert fit.timing.prefill[1] == pytest.approx(4, rel=0.15)
    for _ in range(200):
        fit.observe((0.0, 2e-6, 0.01))  # attention is all that counts
    assert fit.timing.prefill[1] < 0.01


def test_an_engine_measures_its_steps() -> None:
    backend = FakeBackend(LIMITS.vocab)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    engine = assemble(backend, LIMITS, block_events=True)
    for id in range(12):
        engine.add(Request(id, tuple(range(40)), SamplingParams(), 6, salt=str(id)))
    engine.step()
    assert engine.stats().uncached_tokens == 12 * 40 - 64  # what the first step has not planned
    while not engine.idle:
        engine.step()
    stats = engine.stats()
    assert stats.uncached_tokens == 0
    assert max(stats.step_seconds[:2]) > 0
    assert TimingFit(LIMITS).observe(stats.step_seconds)
    assert 0 < stats.prompt_seconds <= stats.busy_seconds
    assert not any(assemble(backend, LIMITS).stats().step_seconds)


def test_what_waits_counts_without_what_is_cached() -> None:
    backend = FakeBackend(LIMITS.vocab)
    limits = LIMITS._replace(max_rows=1)
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    engine = assemble(backend, limits, block_events=True)
    for id in range(2):
        engine.add(Request(id, tuple(range(40)), SamplingParams(), 6))
        if not id:
            while not engine.idle:
                engine.step()
    engine.add(Request(3, (99,), SamplingParams(), 6))
    engine.step()
    engine.add(Request(4, tuple(range(44)), SamplingParams(), 6))
    engine.step()
    assert engine.stats().uncached_tokens == 1 + 4


def test_counters_never_go_back() -> None:
    totals = FleetTotals()
    one, other = ReplicaInfo("one", epoch=1), ReplicaInfo("other", epoch=1)
    totals.note(one, Stats(running=2, steps=10, step_seconds=(1.0,), prefilling=(7,)))
    totals.note(other, Stats(running=3, steps=5, prefilling=(8, 9)))
    assert (totals.sum().running, totals.sum().steps, totals.sum().prefilling) == (5, 15, (7, 8, 9))
    totals.end(one)
    assert (totals.sum().running, totals.sum().steps, totals.sum().prefilling) == (3, 15, (8, 9))
    totals.note(one, Stats(running=1, steps=11))  # it was the connection that was lost
    assert (totals.sum().running, totals.sum().steps) == (4, 16)
    totals.note(one._replace(epoch=2), Stats(running=1, steps=1))
    assert (totals.sum().running, totals.sum().steps) == (4, 17)


def test_a_view_routes_by_what_replicas_hold() -> None:
    view = FleetView(LIMITS, chain)
    request = Request(1, tuple(range(41)), SamplingParams(), 5)
    assert view.route(request, "", 0.0) is None
    hashes = chain("", request.prompt, LIMITS.block_size)
    for replica in range(3):
        view.open(replica)
        view.restore(replica, BlockSnapshot(7, 0, b"" if replica else b"".join(hashes[:5])))
    route = view.route(request, "", 0.0)
    assert route is not None
    assert (route.replica, route.cached) == (0, 20)
    view.shut(0)
    stored: list[BlockEvent] = [BlockStored(number, 7, hash, b"", ()) for number, hash in enumerate(hashes)]
    assert view.follow(2, 7, stored)
    route = view.route(request, "", 1e9)
    assert route is not None
    assert (route.replica, route.cached) == (2, 40)
    assert view.follow(2, 7, stored[:1])  # what was applied before is skipped
    assert not view.follow(1, 7, stored[3:])
    view.open(0)
    view.drop(2)
    route = view.route(request, "", 2e9)
    assert route is not None
    assert route.replica == 0
    whole = request._replace(sampling=SamplingParams(prompt_logprobs=1))
    route = view.route(whole, "", 3e9)
    assert route is not None
    assert route.cached == 0


@pytest.mark.parametrize("weights", [WeightState(), WeightState(0, "v2", "there", 3)])
def test_salts_are_the_engines(folder: Path, weights: WeightState) -> None:
    engine: Any = engine_with(folder)
    engine.weights = weights
    uses = (AdapterUse("one", 2.0), AdapterUse("two", 0.0), AdapterUse("three"))
    request = Request(1, tuple(range(8)), SamplingParams(), 2, salt="me", adapters=uses)
    assert {info.digest for info in engine.find(AdapterControl).listed()} == {""}
    engine.add(request)
    salts = set()
    while not engine.idle:
        salts |= {sequence.blocks.salt for sequence in engine.scheduler.sequences.values()}
        engine.step()
    infos = {info.name: info for info in engine.find(AdapterControl).listed()}
    assert salts == {salt_of(request, infos, weights)}
    assert salt_of(request._replace(adapters=()), {}, WeightState()) == "me"


def test_native_and_python_hashes_are_the_same() -> None:
    tokens = tuple(range(100))
    assert chain_hash()("salt", tokens, 16) == chain("salt", tokens, 16)
