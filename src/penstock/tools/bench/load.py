"""Generates closed-loop load: each client sends its next request when the previous one is answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from penstock.errors import PenstockError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Describes the clients and requests of a benchmark."""

    concurrency: int
    requests: int
    input_len: int
    output_len: int
    shared_prefix: int = 0  # leading tokens that all prompts share
    seed: int = 0


@dataclass(slots=True)
class RequestTiming:
    """Records the times and tokens of one request on the client side. Times are from `time.perf_counter`."""

    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # one per piece of the answer
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    def begin(self) -> None:
        self.started = time.perf_counter()

    def arrive(self) -> None:
        self.arrivals.append(time.perf_counter())


class Target(Protocol):
    """Represents a measured engine or server."""

    vocab: range  # token ids for prompts

    async def complete(self, prompt: Sequence[int], max_tokens: int, timing: RequestTiming) -> None:
        """Requests `max_tokens` tokens after `prompt` and records them in `timing`. Raises PenstockError."""

    async def drafts(self) -> DraftTotals:
        """Returns the draft counts since the start, where known."""


class DraftTotals(NamedTuple):
    """Counts drafted and accepted tokens."""

    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Holds the measured speed of a workload. Times are in milliseconds; inter-token latency (itl) is the time between
    two pieces of one answer.
    """

    concurrency: int
    requests: int
    errors: int
    first_error: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tok_s: float
    total_tok_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    drafted_tokens: int = 0  # also 0 if the server does not report it
    accepted_tokens: int = 0


def run(measuring: Coroutine[Any, Any, T]) -> T:
    """Runs a measurement with uvloop if installed, which halves the cost of a token."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(measuring)
    result: T = uvloop.run(measuring)
    return result


async def run_workload(target: Target, workload: Workload, on_done: Callable[[], None]) -> Result:
    todo = prompts(workload, target.vocab)
    timings: list[RequestTiming] = []

    async def client() -> None:
        for prompt in todo:
            timing = RequestTiming()
            timings.append(timing)
            try:
                await target.complete(prompt, workload.output_len, timing)
            except PenstockError as error:
                timing.error = error.message
            on_done()

    before = await target.drafts()
    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(workload.concurrency)))
    result = summarize(workload, timings, time.perf_counter() - began)
    drafted, accepted = (now - then for now, then in zip(await target.drafts(), before, strict=True))
    return replace(result, drafted_tokens=drafted, accepted_tokens=accepted)


def prompts(workload: Workload, vocab: range) -> Iterator[list[int]]:
    """Yields a workload's prompts, deterministically. After the shared prefix, no two begin alike."""
    dice = random.Random(f"{workload.seed}")
    prefix = dice.choices(vocab, k=workload.shared_prefix)
    dice = random.Random(f"{workload.seed} {workload.concurrency}")
    for _ in range(workload.requests):
        yield prefix + dice.choices(vocab, k=workload.input_len - len(prefix))


def summarize(workload: Workload, timings: Sequence[RequestTiming], seconds: float) -> Result:
    good = [timing for timing in timings if not timing.error]
    output = sum(timing.output_tokens for timing in good)
    prompt = sum(timing.prompt_tokens for timing in good)
    ttft = _percentiles([timing.arrivals[0] - timing.started for timing in good if timing.arrivals])
    itl = _percentiles([later - earlier for timing in good for earlier, later in pairwise(timing.arrivals)])
    return Result(
        concurrency=workload.concurrency,
        requests=len(timings),
        errors=len(timings) - len(good),
        first_error=next((timing.error for timing in timings if timing.error), ""),
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(timing.cached_tokens for timing in good),
        output_tokens=output,
        output_tok_s=output / seconds,
        total_tok_s=(prompt + output) / seconds,
        ttft_p50=ttft[0],
        ttft_p99=ttft[1],
        itl_p50=itl[0],
        itl_p99=itl[1],
    )


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    """Returns the 50th and the 99th percentile in milliseconds; 0 without values."""
    p50, p99 = np.percentile(seconds or [0.0], [50, 99]) * 1000
    return float(p50), float(p99)
