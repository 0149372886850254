"""Closed-loop load: so many clients, each asking again as soon as it is answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

from penstock.errors import PenstockError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    concurrency: int
    requests: int
    input_len: int
    output_len: int
    shared_prefix: int = 0  # leading tokens that all prompts have in common
    seed: int = 0


@dataclass(slots=True)
class Sample:
    """One request as its client saw it."""

    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of each piece of the answer
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    def begin(self) -> None:
        self.started = time.perf_counter()

    def arrive(self) -> None:
        self.arrivals.append(time.perf_counter())


class Target(Protocol):
    vocab: range  # ids that prompts may be made of

    async def complete(self, prompt: Sequence[int], max_tokens: int, sample: Sample) -> None:
        """Asks for `max_tokens` tokens after `prompt` and notes in `sample` what comes. Raises PenstockError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Times are milliseconds; inter-token latency (itl) is the time between two pieces of one answer."""

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


def run(measuring: Coroutine[Any, Any, T]) -> T:
    """With uvloop where it is there: half the cost of a token."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(measuring)
    result: T = uvloop.run(measuring)
    return result


async def drive(target: Target, load: Load, on_done: Callable[[], None]) -> Result:
    todo = prompts(load, target.vocab)
    samples: list[Sample] = []

    async def client() -> None:
        for prompt in todo:
            sample = Sample()
            samples.append(sample)
            try:
                await target.complete(prompt, load.output_len, sample)
            except PenstockError as error:
                sample.error = error.message
            on_done()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.concurrency)))
    return summarize(load, samples, time.perf_counter() - began)


def prompts(load: Load, vocab: range) -> Iterator[list[int]]:
    """The same for the same load; beyond the shared prefix no two begin alike."""
    dice = random.Random(f"{load.seed}")
    prefix = dice.choices(vocab, k=load.shared_prefix)
    dice = random.Random(f"{load.seed} {load.concurrency}")
    for _ in range(load.requests):
        yield prefix + dice.choices(vocab, k=load.input_len - len(prefix))


def summarize(load: Load, samples: Sequence[Sample], seconds: float) -> Result:
    good = [sample for sample in samples if not sample.error]
    output = sum(sample.output_tokens for sample in good)
    prompt = sum(sample.prompt_tokens for sample in good)
    ttft = _percentiles([sample.arrivals[0] - sample.started for sample in good if sample.arrivals])
    itl = _percentiles([later - earlier for sample in good for earlier, later in pairwise(sample.arrivals)])
    return Result(
        concurrency=load.concurrency,
        requests=len(samples),
        errors=len(samples) - len(good),
        first_error=next((sample.error for sample in samples if sample.error), ""),
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(sample.cached_tokens for sample in good),
        output_tokens=output,
        output_tok_s=output / seconds,
        total_tok_s=(prompt + output) / seconds,
        ttft_p50=ttft[0],
        ttft_p99=ttft[1],
        itl_p50=itl[0],
        itl_p99=itl[1],
    )


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    """The 50th and 99th percentile in milliseconds; 0 of nothing."""
    p50, p99 = np.percentile(seconds or [0.0], [50, 99]) * 1000
    return float(p50), float(p99)
