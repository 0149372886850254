"""Tests the simulated replica against the engine's own scheduler, which runs on the same virtual clock and timing."""

from __future__ import annotations

from random import Random

import pytest

from penstock.core import Scheduler, Sequence
from penstock.fleet.timing import EngineTiming
from penstock.tools.sim.simulation import FleetOptions, FleetReport, simulate
from penstock.tools.trace_replay import prompt_of
from penstock.tools.traces import Trace, TracedRequest
from penstock.types import Limits, RowResult, StepResult, Tokens

BLOCK = 16
TIMING = EngineTiming(
    prefill=(1e-5, 0.7, 4.0),  # about 1,400 tokens/s, as a small model on two cores
    decode=(0.0, 60.0, 8.0),
    kv_tokens=12_000,
    step_tokens=512,
    max_rows=64,
    prefill_budget=192,
)
REPLICAS = 3


def conversations(interval: float) -> Trace:
    """Makes conversations of three turns with prompts of 100 to 700 tokens, one turn every so many milliseconds."""
    random, requests = Random(1), []
    for user in range(60):
        path: list[int] = [1, 2]
        for turn in range(3):
            path += [1000 * user + 100 * turn + each + 10 for each in range(random.randint(5, 12))]
            at = (user + 12 * turn) * 3 * interval + random.uniform(0, interval)
            prompt = len(path) * BLOCK + random.randint(1, BLOCK - 1)
            requests.append(TracedRequest(at, prompt, random.randint(5, 40), tuple(path)))
    return Trace(BLOCK, sorted(requests, key=lambda each: each.arrival))


class EngineOnAVirtualClock:
    """Runs requests in the engine's scheduler; a step takes as long as the timing says."""

    def __init__(self) -> None:
        blocks = TIMING.kv_tokens // BLOCK
        rows, tokens = TIMING.max_rows, TIMING.step_tokens
        self.scheduler = Scheduler(Limits(4096, rows, tokens, BLOCK, blocks, vocab=9000, prefill_budget=192))
        self.arrived: dict[int, list[float]] = {}  # of each token of an answer
        self.cached = 0

    def run(self, requests: list[tuple[int, TracedRequest]]) -> None:
        now, coming = 0.0, list(requests)
        while coming or self.scheduler.sequences:
            if not self.scheduler.sequences:
                now = max(now, coming[0][1].arrival)
            while coming and coming[0][1].arrival <= now:
                id, traced = coming.pop(0)
                prompt = prompt_of(id, traced, BLOCK, range(1, 9000))
                self.scheduler.add(Sequence(id, tuple(prompt), traced.output))
            now += self.step(now)

    def step(self, now: float) -> float:
        """Runs one step; returns its milliseconds."""
        plan, sequences = self.scheduler.plan(), self.scheduler.sequences
        prompts = sum(row.count for row in plan.rows if row.start < sequences[row.seq].prompt_len)
        answers = sum(row.start >= sequences[row.seq].prompt_len for row in plan.rows)
        share = sum(seq.end for seq in self.scheduler.running) / TIMING.kv_tokens
        took = TIMING.prefill_ms(prompts) + (TIMING.decode_ms(share) if answers else 0.0)
        rows = tuple(RowResult(tokens=(50,) if row.sample else ()) for row in plan.rows)
        for event in self.scheduler.commit(plan, StepResult(plan.step, rows)):
            if isinstance(event, Tokens) and event.tokens:
                if event.seq not in self.arrived:
                    self.cached += event.cached
                self.arrived.setdefault(event.seq, []).append(now + took)
        return took


def run_engines(trace: Trace) -> tuple[float, float, float]:
    """Returns the mean TTFT, the mean ITL and the reuse of engines that take requests in turn."""
    engines = [EngineOnAVirtualClock() for _ in range(REPLICAS)]
    numbered = list(enumerate(trace.requests))
    for at, engine in enumerate(engines):
        engine.run(numbered[at::REPLICAS])
    arrived = {id: times for engine in engines for id, times in engine.arrived.items()}
    assert len(arrived) == len(numbered)
    ttft = [arrived[id][0] - traced.arrival for id, traced in numbered]
    itl = [(times[-1] - times[0]) / (len(times) - 1) for times in arrived.values() if len(times) > 1]
    cached = sum(engine.cached for engine in engines) / sum(traced.prompt for _, traced in numbered)
    return sum(ttft) / len(ttft), sum(itl) / len(itl), cached


@pytest.mark.parametrize(
    "interval", [100.0, 60.0]
)  # milliseconds: the replicas are busy for half and for nine tenths of it
def test_the_simulator_is_near_the_scheduler(interval: float) -> None:
    trace = conversations(interval)
    ttft, itl, reuse = run_engines(trace)
    report: FleetReport = simulate(trace, FleetOptions(REPLICAS, "round-robin", TIMING))
    assert report.ttft_mean_ms == pytest.approx(ttft, rel=0.15)
    assert report.itl_mean_ms == pytest.approx(itl, rel=0.15)
    assert report.reuse == pytest.approx(reuse, abs=0.03)
