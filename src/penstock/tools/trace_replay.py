"""Replays a trace against servers at its own times, and summarizes the results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from penstock.errors import PenstockError
from penstock.fleet.scale import ServiceTargets
from penstock.tools.bench.load import RequestTiming, Target
from penstock.tools.sim.simulation import TARGETS
from penstock.tools.traces import Trace, TracedRequest


class ReplayOptions(NamedTuple):
    """Sets the options of a replay."""

    concurrency: int = 256  # most requests at once
    seed: int = 0  # generates the tokens; different seeds share no prefixes
    targets: ServiceTargets = TARGETS


class ReplayReport(NamedTuple):
    """Holds the results of a replay in the simulator's terms."""

    requests: int
    errors: int
    first_error: str
    held_back: int  # requests delayed by the concurrency limit
    ttft_mean_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    reuse: float  # share of prompt tokens that the servers report as cached
    goodput: float  # requests per second that met both targets
    seconds: float


@lru_cache(maxsize=4096)
def _tokens(name: str, count: int, vocab: range) -> tuple[int, ...]:
    random = Random(name)
    return tuple(random.choice(vocab) for _ in range(count))


def prompt_of(number: int, traced: TracedRequest, block_size: int, vocab: range, seed: int = 0) -> list[int]:
    """Generates a prompt with the trace's blocks and a unique remainder."""
    prompt = [token for name in traced.hashes for token in _tokens(f"{seed} block {name}", block_size, vocab)]
    return prompt + list(_tokens(f"{seed} request {number}", traced.prompt - len(prompt), vocab))


async def replay(trace: Trace, targets: Sequence[Target], options: ReplayOptions) -> ReplayReport:
    """Sends each request at its time, to the targets in turn. Failed requests are counted, and the others continue."""
    slots, begun = asyncio.Semaphore(options.concurrency), time.perf_counter()
    timings, held_back = [], []

    async def send(number: int, traced: TracedRequest) -> None:
        due = begun + traced.arrival / 1000
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        target, timing = targets[number % len(targets)], RequestTiming()
        prompt = prompt_of(number, traced, trace.block_size, target.vocab, options.seed)
        timings.append(timing)
        held_back.append(slots.locked())
        async with slots:
            try:
                await target.complete(prompt, traced.output, timing)
                if not timing.arrivals:
                    timing.error = "the answer has no token"
            except (PenstockError, OSError) as error:
                timing.error = str(error) or type(error).__name__

    await asyncio.gather(*(send(number, traced) for number, traced in enumerate(trace.requests)))
    return _sum_up(timings, time.perf_counter() - begun, sum(held_back), options.targets)


def _sum_up(timings: list[RequestTiming], seconds: float, held_back: int, targets: ServiceTargets) -> ReplayReport:
    done = [each for each in timings if not each.error]
    errors = [each.error for each in timings if each.error]
    ttft = sorted(_ttft(each) for each in done)
    gaps = [_itl(each) for each in done if len(each.arrivals) > 1]
    return ReplayReport(
        requests=len(timings),
        errors=len(errors),
        first_error=errors[0] if errors else "",
        held_back=held_back,
        ttft_mean_ms=sum(ttft) / max(len(ttft), 1),
        ttft_p99_ms=ttft[min(int(0.99 * len(ttft)), len(ttft) - 1)] if ttft else 0.0,
        itl_mean_ms=sum(gaps) / len(gaps) if gaps else 0.0,
        reuse=sum(each.cached_tokens for each in done) / max(sum(each.prompt_tokens for each in done), 1),
        goodput=sum(_ttft(each) <= targets.ttft and _itl(each) <= targets.itl for each in done) / seconds,
        seconds=seconds,
    )


def _ttft(timing: RequestTiming) -> float:
    return (timing.arrivals[0] - timing.started) * 1000


def _itl(timing: RequestTiming) -> float:
    return (timing.arrivals[-1] - timing.arrivals[0]) * 1000 / max(timing.output_tokens - 1, 1)
