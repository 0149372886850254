"""Steps a real engine through answers that are known: every step is computed, but what it samples is replaced by what
was recorded. So a draft is accepted where it equals the record, whatever the model would have said."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.backend.base import Ticket
from penstock.engine.engine import Engine
from penstock.engine.feature import Feature
from penstock.types import DraftCounts, Finished, Request, Row, RowResult, SamplingParams, StepPlan, Tokens, add_drafts

PLACES = 2000  # tokens of a text whose answers copy from it and jump


class Recorded(NamedTuple):
    """Holds a prompt and the answer that it got."""

    prompt: list[int]
    answer: list[int]
    owner: str  # recent answers of the same owner may be drafted from


class Speed(NamedTuple):
    """Says how fast answers came, and what was drafted."""

    tokens_per_second: float
    drafts: tuple[DraftCounts, ...]


class Script(Feature):
    """Has an engine answer requests with the tokens of `answers`."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[int, Sequence[int]]] = {}  # by request: the length of its prompt, and its answer
        self._plans: dict[Ticket, StepPlan] = {}
        self._waited: Any = None  # the backend's own method

    def launched(self, plan: StepPlan, gap: float) -> None:
        backend = self.engine.backend
        if self._waited is None:
            self._waited = backend.wait
            backend.wait = self._wait  # type: ignore[method-assign]
        self._plans[self.engine.pipeline.in_flight[-1].ticket] = plan

    def close(self) -> None:
        if self._waited is not None:
            self.engine.backend.wait = self._waited  # type: ignore[method-assign]

    def _wait(self, ticket: Ticket) -> Any:
        result, plan = self._waited(ticket), self._plans.pop(ticket, None)
        if plan is None:  # a draft model's step
            return result
        rows = tuple(map(self._scripted, plan.rows, result.rows))
        return result._replace(rows=rows)

    def _scripted(self, row: Row, answer: RowResult) -> RowResult:
        if row.seq not in self.answers or not answer.tokens:
            return answer
        prompt, tokens = self.answers[row.seq]
        last = row.start + row.count - prompt
        said = [tokens[at] if at < len(tokens) else 0 for at in range(last - len(answer.tokens) + 1, last + 1)]
        return answer._replace(tokens=tuple(said))


class Runner:
    """Runs recorded answers on one engine, with drafts and without."""

    def __init__(self, engine: Engine) -> None:
        """Takes an engine that has a Script."""
        self._engine = engine
        self._answers = engine.find(Script).answers
        self._ids = iter(range(1 << 30))

    def compare(self, records: Sequence[Recorded], rows: int, rounds: int) -> tuple[list[float], Speed]:
        """Returns how many times faster answers came with drafts, round by round, and the last round with them."""
        ratios = []
        for number in range(rounds):
            first = number % 2  # neither side is always the first
            one, other = self.run(records, rows, drafts=bool(first)), self.run(records, rows, drafts=not first)
            drafted, plain = (one, other) if first else (other, one)
            ratios.append(drafted.tokens_per_second / plain.tokens_per_second)
        return ratios, drafted

    def run(self, records: Sequence[Recorded], rows: int, *, drafts: bool) -> Speed:
        """Answers all requests, `rows` at a time. Steps that compute a prompt do not count."""
        engine, waiting = self._engine, list(reversed(records))
        answering: dict[int, bool] = {}  # whether a request has begun to answer
        reports, tokens, seconds = [], 0, 0.0
        while waiting or answering:
            while waiting and len(answering) < rows:
                answering[self._add(waiting.pop(), drafts)] = False
            counts, began = all(answering.values()), time.perf_counter()
            events = engine.step()
            seconds += counts * (time.perf_counter() - began)
            for event in events:
                if isinstance(event, Tokens) and event.tokens:
                    answering[event.seq] = True
                    tokens += counts * len(event.tokens)
                elif isinstance(event, Finished):
                    del answering[event.seq], self._answers[event.seq]
                    reports.append(event.report)
        return Speed(tokens / seconds, add_drafts(each for report in reports if report for each in report.drafts))

    def _add(self, recorded: Recorded, drafts: bool) -> int:
        id, greedy = next(self._ids), SamplingParams(temperature=0.0, ignore_eos=True)
        self._answers[id] = len(recorded.prompt), recorded.answer
        self._engine.add(
            Request(
                id,
                tuple(recorded.prompt),
                greedy,
                len(recorded.answer),
                owner=f"{recorded.owner} {id}",  # nobody drafts from the round before
                speculation=None if drafts else 0,
            )
        )
        return id


def jumping(acceptance: float, count: int, length: int, seed: int = 1) -> list[Recorded]:
    """Returns records whose drafts are accepted with a set probability: each token of an answer is the one that follows
    in the prompt, or else one from anywhere in it. No token occurs twice in a prompt."""
    dice = random.Random(seed)
    records = []
    for number in range(count):
        prompt = dice.sample(range(1000, 30_000), PLACES)
        at, answer = 0, list[int]()
        for _ in range(length):
            at = (at + 1) % PLACES if dice.random() < acceptance else dice.randrange(PLACES)
            answer.append(prompt[at])
        records.append(Recorded(prompt, answer, str(number)))
    return records


def described(ratios: Sequence[float], speed: Speed) -> str:
    """Returns a line about a comparison: the median ratio and its range, and what was drafted."""
    drafted, accepted = sum(each.drafted for each in speed.drafts), sum(each.accepted for each in speed.drafts)
    spread = f"{statistics.median(ratios):.3f}x ({min(ratios):.3f} to {max(ratios):.3f})"
    return f"{spread}, {speed.tokens_per_second:.0f} tokens/s, {drafted} drafted, {accepted} accepted"
