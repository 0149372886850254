"""Admits requests to a real scheduler whose steps take virtual time: every wait is known, and nothing is slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from penstock.core import Scheduler, SequenceParams
from penstock.core import Sequence as Stream
from penstock.core.policy import StandardPolicy
from penstock.core.step_cost import CostModel
from penstock.errors import WaitTooLong
from penstock.server.access.expected_wait import ExpectedRequest, WaitForecast
from penstock.types import (
    Claim,
    DraftCounts,
    Finished,
    Limits,
    Request,
    RowResult,
    SamplingParams,
    Stats,
    StepPlan,
    StepResult,
    Tokens,
)

LIMITS = Limits(
    max_len=4096, max_rows=32, step_tokens=256, block_size=16, num_blocks=8192, vocab=1000, prefill_budget=64
)
TOKEN, PAIR, ANSWER = 1.2e-3, 2e-7, 0.02  # seconds of a prompt's token, of a pair of such, of a step that answers


@dataclass
class Sent:
    """Records what became of a request."""

    request: Request
    sent: float
    expected: ExpectedRequest | None = None  # what the forecast knows of it
    refusal: WaitTooLong | None = None
    first: float | None = None  # when its first token came
    answer: list[int] = field(default_factory=list)

    @property
    def waited(self) -> float:
        assert self.first is not None
        return self.first - self.sent


class VirtualEngine:
    """Computes what a scheduler plans. `slowness` is how many times longer than usual its steps take."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.costs = CostModel()
        self.scheduler = Scheduler(limits, policy=StandardPolicy(limits, self.costs))
        self.slowness = 1.0
        self.rejected = 0  # tokens of each answering row's draft that turn out wrong
        self.stats = Stats()  # as of the end of the last step
        self.step_end: float | None = None  # of the step in flight
        self._plan: StepPlan
        self._busy = self._began = 0.0
        self._computed = self._drafted = 0
        self._earlier = Stats()  # of engines before this one
        self._spent = 0.0  # by prompts, in engines before
        self._random = Random(7)

    def begin(self, now: float) -> None:
        """Starts a step if there is anything to compute and none is in flight."""
        if self.step_end is not None or not self.scheduler.sequences:
            return
        self.scheduler.now = now
        self._plan = self.scheduler.plan()
        answering = sum(row.count == 1 for row in self._plan.rows)
        seconds = ANSWER + 1e-3 * answering if answering else 1e-4
        for row in self._plan.rows:
            if row.count > 1:
                seconds += TOKEN * row.count + PAIR * row.count * (row.start + row.count / 2)
        seconds *= self.slowness * self._random.uniform(0.8, 1.2)
        self._began, self.step_end = now, now + seconds
        self._computed += sum(row.count for row in self._plan.rows) + self.rejected * answering
        self._drafted += self.rejected * answering

    def finish(self) -> list[Tokens | Finished]:
        """Ends the step in flight; returns its events."""
        assert self.step_end is not None
        now, seconds, self.step_end = self.step_end, self.step_end - self._began, None
        self._busy += seconds
        self.scheduler.now = now
        self.costs.observe(self._plan.rows, seconds)
        rows = tuple(RowResult(tokens=(7,) if row.sample else ()) for row in self._plan.rows)
        events = self.scheduler.commit(self._plan, StepResult(self._plan.step, rows))
        self.stats = self._statistics()
        return [event for event in events if isinstance(event, Tokens | Finished)]

    def restart(self) -> None:
        """Stands for another engine process that has adopted the prefix cache: counters and costs start again."""
        assert not self.scheduler.sequences
        self._earlier = self.scheduler.stats()
        self.costs = self.scheduler.policy._costs = CostModel()  # type: ignore[attr-defined]
        self._busy, self._computed, self._drafted = 0.0, 0, 0
        self.stats = self._statistics()

    def _statistics(self) -> Stats:
        stats, earlier = self.scheduler.stats(), self._earlier
        counted = ("prompt_tokens", "cached_tokens", "generated_tokens")
        since = {name: getattr(stats, name) - getattr(earlier, name) for name in counted}
        ended = () if self.scheduler.running else (DraftCounts("ngram", 0, self._drafted, 0),)
        return stats._replace(
            **since,
            busy_seconds=self._busy,
            computed_tokens=self._computed,
            drafts=ended,
            step_seconds=self.costs.measured(stats.running),
            prompt_seconds=self.costs.spent_on_prompts,
        )


class VirtualServer:
    """Forecasts, refuses and sends. Of several engines it sends to the one with the fewest requests."""

    def __init__(self, engines: int = 1, patience: float = 60.0, indexed: bool = False) -> None:
        self.engines = [VirtualEngine() for _ in range(engines)]
        self.forecast = WaitForecast()
        self.now = 0.0
        self.all: list[Sent] = []
        self._patience = patience
        self._indexed = indexed  # it knows what engines hold
        self._open: dict[int, Sent] = {}
        self._ids = count(1)
        self._random = Random(3)

    def unique(self, tokens: int) -> tuple[int, ...]:
        """Returns a prompt that no other begins with."""
        return tuple(self._random.choices(range(1, 1000), k=tokens))

    def send(self, prompt: Sequence[int], answer: int = 8, sender: object = None, ttft: float | None = None) -> Sent:
        stated = Claim(ttft=ttft)
        request = Request(next(self._ids), tuple(prompt), SamplingParams(), answer, claim=stated)
        sent = Sent(request, self.now)
        self.all.append(sent)
        engine = min(self.engines, key=lambda each: len(each.scheduler.sequences))
        stream = Stream(request.id, request.prompt, answer, SequenceParams(claim=stated))
        self._measure()
        cached = engine.scheduler.cache.prefixes.held(stream) if self._indexed else 0
        try:
            sent.expected = self.forecast.admit(request, self._patience, self.now, LIMITS, sender, cached)
        except WaitTooLong as error:
            sent.refusal = error
        else:
            self._open[request.id] = sent
            engine.scheduler.now = self.now
            engine.scheduler.add(stream)
            engine.begin(self.now)
        return sent

    def send_all(self, prompts: Iterable[Sequence[int]], ttft: float | None = None) -> list[Sent]:
        return [self.send(prompt, ttft=ttft) for prompt in prompts]

    def run(self, seconds: float = float("inf")) -> None:
        """Lets time pass, at most until nothing is left to do."""
        until = self.now + seconds
        while busy := [engine for engine in self.engines if engine.step_end is not None]:
            engine = min(busy, key=lambda each: each.step_end or 0.0)
            assert engine.step_end is not None
            if engine.step_end > until:
                break
            self.now = engine.step_end
            for event in engine.finish():
                self._take(event)
            engine.begin(self.now)
        self.now = max(self.now, until) if until < float("inf") else self.now

    def _take(self, event: Tokens | Finished) -> None:
        sent = self._open[event.seq]
        assert sent.expected is not None
        if isinstance(event, Finished):
            self.forecast.end(sent.expected, sent.answer, LIMITS)
            del self._open[event.seq]
            return
        if sent.first is None:
            sent.first = self.now
            self._measure()
            self.forecast.answer(sent.expected, self.now, event.cached)
        sent.answer += event.tokens

    def _measure(self) -> None:
        every = [engine.stats for engine in self.engines]
        known = [stats.step_seconds for stats in every if any(stats.step_seconds)]
        mean = tuple(sum(seconds) / len(known) for seconds in zip(*known, strict=True))
        names = ("in_line", "prompt_tokens", "cached_tokens", "generated_tokens", "computed_tokens")
        added = {name: sum(getattr(stats, name) for stats in every) for name in (*names, "busy_seconds")}
        prompts = sum(stats.prompt_seconds for stats in every)
        drafts = tuple(counts for stats in every for counts in stats.drafts)
        self.forecast.measure(
            Stats(**added, prompt_seconds=prompts, step_seconds=mean, drafts=drafts), len(self.engines)
        )


def false_refusals(sent: Sequence[Sent], allowed: float) -> int:
    """Returns how many were refused although all that were admitted had their first token in time."""
    late = [each for each in sent if each.refusal is None and each.waited > allowed]
    return 0 if late else sum(each.refusal is not None for each in sent)


def false_admissions(sent: Sequence[Sent], allowed: float) -> int:
    """Returns how many were admitted and had their first token too late."""
    return sum(each.refusal is None and each.waited > allowed for each in sent)
