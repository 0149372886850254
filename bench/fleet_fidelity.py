"""Compares the simulator with three real engines: `python bench/fleet_fidelity.py --trace FILE`.

It starts `penstock fleet serve` with one thread for each engine, measures how long prompts and answers take there and
how much engines slow each other down, replays a piece of a trace over HTTP, and simulates the same piece with that
timing. The calibration uses other prompts than the replay. Prints the mean TTFT of both, round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import httpx
import numpy as np
from quiet import Clock, adopt_orphans, others_since, reap_orphans, wait_for_quiet
from served import running_fleet

from penstock.fleet.route import RoutingWeights
from penstock.fleet.timing import EngineTiming
from penstock.tools.bench.load import RequestTiming, run
from penstock.tools.bench.targets import UrlTarget
from penstock.tools.sim.simulation import FleetOptions, FleetReport, simulate
from penstock.tools.trace_replay import ReplayOptions, ReplayReport, prompt_of, replay
from penstock.tools.traces import Trace, TracedRequest, read_trace

REPLICAS = 3
SIZES = (32, 128, 256, 512, 1024, 1536)  # tokens of prompts that are timed
CONTENDED = 512  # tokens of those that several engines compute at once
PROMPT, ANSWER = 256, 48  # tokens of requests whose answers are timed
ROWS = 4  # answers of an engine at once
BUDGET = 192  # prefill budget: a CPU's own
QUIET, PATIENCE = 0.1, 90.0  # share of the processors that others may have at the start, and seconds to wait for it
PULL_MS = 0.1  # of a token, as a gateway believes until it has measured pulls


class Calibration(NamedTuple):
    """Is what was measured of the engines."""

    timing: EngineTiming  # of one that computes alone
    contention: tuple[float, ...]  # times as long that steps take while 1, 2, 3 engines compute


class Prober:
    """Sends requests of which none shares a prefix with another."""

    def __init__(self, target: UrlTarget) -> None:
        self._target = target
        self._sent = 0

    async def at_once(self, count: int, prompt: int, output: int) -> list[RequestTiming]:
        """Returns the times of so many equal requests that are sent together."""
        timings = [RequestTiming() for _ in range(count)]
        request = TracedRequest(0.0, prompt, output)
        names = range(self._sent, self._sent + count)
        self._sent += count
        prompts = [prompt_of(name, request, 1, self._target.vocab, seed=-1) for name in names]
        both = zip(prompts, timings, strict=True)
        await asyncio.gather(*(self._target.complete(tokens, output, timing) for tokens, timing in both))
        return timings

    async def first_token_ms(self, count: int, prompt: int, rounds: int) -> float:
        """Returns the mean TTFT of prompts that so many engines compute at once."""
        found = [await self.at_once(count, prompt, 1) for _ in range(rounds)]
        return median(mean(1000 * (each.arrivals[0] - each.started) for each in timings) for timings in found)

    async def step_ms(self, count: int) -> float:
        """Returns the time between two tokens while so many requests are answered."""
        timings = await self.at_once(count, PROMPT, ANSWER)
        begun, ended = max(each.arrivals[0] for each in timings), min(each.arrivals[-1] for each in timings)
        pairs = [pair for each in timings for pair in pairwise(each.arrivals)]
        return 1000 * median(late - early for early, late in pairs if begun <= early and late <= ended)


async def calibrate(prober: Prober, limits: dict[str, Any], rounds: int) -> Calibration:
    """Measures one engine alone, and several at once."""
    await prober.at_once(REPLICAS, CONTENDED, ANSWER)
    alone = [await prober.first_token_ms(1, size, rounds) for size in SIZES]
    square, linear, fixed = np.polyfit(SIZES, alone, 2, w=1 / np.asarray(alone))
    several = [await prober.first_token_ms(count, CONTENDED, 2 * rounds) for count in range(1, REPLICAS + 1)]
    contention = tuple(max(each / several[0], 1.0) for each in several)
    one = median([await prober.step_ms(1) for _ in range(rounds)])
    many = median([await prober.step_ms(REPLICAS * ROWS) for _ in range(rounds)]) / contention[-1]
    kv_tokens = limits["blocks"] * limits["block_size"]
    share = (PROMPT + ANSWER) / kv_tokens  # of the KV cache, that an answer holds
    slope = max(many - one, 0.0) / ((ROWS - 1) * share)
    timing = EngineTiming(
        prefill=(float(square), float(linear), float(fixed)),
        decode=(0.0, slope, one - slope * share),
        kv_tokens=kv_tokens,
        step_tokens=limits["step_tokens"],
        max_rows=limits["max_rows"],
        prefill_budget=BUDGET,
        pull_ms_per_token=PULL_MS,
        host_ms_per_token=PULL_MS,
        context_ms=2 * float(square),
    )
    print(f"prompts of {SIZES} tokens: {', '.join(f'{each:.0f}' for each in alone)} ms; 1, 2, 3 engines at once take")
    print(f"  {', '.join(f'{each:.2f}' for each in contention)} times as long; a step answers 1 row in {one:.1f} ms,")
    print(f"  {ROWS} rows in {many:.1f} ms", flush=True)
    return Calibration(timing, contention)


def piece_of(trace: Trace, skip: int, limit: int) -> Trace:
    """Returns some requests of a trace, the first of them at once."""
    requests = trace.requests[skip : skip + limit]
    begin = requests[0].arrival
    return Trace(trace.block_size, [each._replace(arrival=each.arrival - begin) for each in requests])


def simulated(trace: Trace, timing: EngineTiming, contention: Sequence[float]) -> FleetReport:
    weights = RoutingWeights(pull=True)
    return simulate(trace, FleetOptions(REPLICAS, "kv", timing, weights, contention=tuple(contention)))


def compare(trace: Trace, found: Calibration, real: Sequence[ReplayReport]) -> None:
    """Prints what the simulator makes of the piece beside what the engines did."""
    ttft, itl = (mean(getattr(each, name) for each in real) for name in ("ttft_mean_ms", "itl_mean_ms"))
    print(f"real: mean TTFT {ttft:.0f} ms, mean ITL {itl:.1f} ms, reuse {mean(each.reuse for each in real):.1%}")
    ways = {"each alone": (), "all at once": found.contention[-1:], "sharing the machine": found.contention}
    for name, contention in ways.items():
        report = simulated(trace, found.timing, contention)
        print(
            f"simulated, {name}: mean TTFT {report.ttft_mean_ms:.0f} ms ({report.ttft_mean_ms / ttft - 1:+.1%}), mean "
            f"ITL {report.itl_mean_ms:.1f} ms ({report.itl_mean_ms / itl - 1:+.1%}), reuse {report.reuse:.1%}"
        )


async def measure(options: argparse.Namespace) -> None:
    trace = piece_of(read_trace(options.trace), options.skip, options.limit).at_speed(options.speed)
    trace = trace.scaled(1 / options.shorter)
    engines = ("--replicas", str(REPLICAS), "--threads", "1", "--prefill-budget", str(BUDGET), "--speculation", "off")
    async with running_fleet(options.model, *engines) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        target = UrlTarget(f"{url}/v1")
        await target.negotiate()
        limits = (await http.get("/engine")).json()["models"][0]
        found = await calibrate(Prober(target), limits, options.probes)
        real = []
        for seed in range(options.rounds):
            before, begun = await busy_seconds(http), time.perf_counter()
            real.append(await replay(trace, [target], ReplayOptions(seed=seed)))
            busy = (await busy_seconds(http) - before) / (time.perf_counter() - begun)
            told = {name: round(value, 3) for name, value in real[-1]._asdict().items() if isinstance(value, float)}
            print(f"round {seed}: {real[-1].requests} requests, {real[-1].errors} failed, {told}")
            print(f"  engines computed at {busy:.2f} times a second a second", flush=True)
    if options.out:
        rounds = [each._asdict() for each in real]
        options.out.write_text(json.dumps({"timing": found.timing, "contention": found.contention, "real": rounds}))
    compare(trace, found, real)


async def busy_seconds(http: httpx.AsyncClient) -> float:
    """Returns for how long engines have computed, all together."""
    return float((await http.get("/engine")).json()["stats"]["busy_seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's, Dynamo's or Azure's")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--skip", type=int, default=0, help="requests of the trace before the piece")
    parser.add_argument("--limit", type=int, default=80, help="requests of the piece")
    parser.add_argument("--speed", type=float, default=0.3, help="times as fast as the trace")
    parser.add_argument("--shorter", type=float, default=32.0, help="times as short, prompts and answers")
    parser.add_argument("--rounds", type=int, default=1, help="replays, each with other tokens")
    parser.add_argument("--probes", type=int, default=3, help="measurements of each kind in the calibration")
    parser.add_argument("--out", type=Path, help="file for the calibration and the rounds")
    adopt_orphans()
    wait_for_quiet(QUIET, PATIENCE)
    start = Clock.now()
    run(measure(parser.parse_args()))
    reap_orphans()
    print(f"others had {others_since(start):.0%} of the processors")


if __name__ == "__main__":
    main()
