"""Measures how fast an answer is, as llama.cpp's clients read it: in the `timings` object."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from msgspec import UNSET, UnsetType

from penstock.text import Delta
from penstock.types import Report, Request


class Timings(msgspec.Struct):
    """Counts tokens and milliseconds. The first generated token comes from the prompt's computation, so the speed of
    generation leaves it out."""

    cache_n: int
    prompt_n: int  # tokens of the prompt that were computed
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET  # these two only if something was drafted, once the answer is complete
    draft_n_accepted: int | UnsetType = UNSET


class Stopwatch:
    """Measures one choice of an answer from the moment that its request is ready. The engine's report, which includes
    the time in the queue, replaces these measurements."""

    def __init__(self, request: Request, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._prompt = len(request.prompt)
        self._begun = clock()
        self._first = self._last = 0.0  # when tokens came
        self._report: Report | None = None
        self.cached = 0
        self.generated = 0

    def add(self, delta: Delta) -> None:
        self.cached = max(self.cached, delta.cached)
        self.generated += len(delta.tokens)
        self._report = delta.report
        if delta.tokens:
            self._last = self._clock()
            self._first = self._first or self._last

    @property
    def generating_ms(self) -> float:
        """Returns the milliseconds since the first token."""
        return (self._last - self._first) * 1e3

    def timings(self) -> Timings:
        report, computed = self._report, self._prompt - self.cached
        prompt_ms = report.prefill * 1e3 if report else max(self._first - self._begun, 0.0) * 1e3
        generating_ms = report.decode * 1e3 if report else self.generating_ms
        steps = max(self.generated - 1, 0)
        return Timings(
            self.cached,
            computed,
            prompt_ms,
            _ratio(prompt_ms, computed),
            _ratio(1e3 * computed, prompt_ms),
            self.generated,
            generating_ms,
            _ratio(generating_ms, steps),
            _ratio(1e3, generating_ms) * steps,
            *_drafted(report),
        )


def _drafted(report: Report | None) -> tuple[int | UnsetType, int | UnsetType]:
    counts = () if report is None else report.drafts
    drafted = sum(each.drafted for each in counts)
    return (drafted, sum(each.accepted for each in counts)) if drafted else (UNSET, UNSET)


def _ratio(amount: float, count: float) -> float:
    return amount / count if count else 0.0
