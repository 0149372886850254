"""Forecasts how long a step takes, from measured steps: the cost of its answers, and the cost that prompts add.

Everything here is pure: times come in as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from penstock.core.drafting.lengths import StepCost
from penstock.types import Row


class PromptCost:
    """Learns the seconds that prompts add to a step: one cost for each token, and one for each pair of a token and an
    earlier one, which attention computes. Both are fitted to the latest steps by least squares."""

    KEEP = 0.95  # decay with each step
    OUTLIER = 1.5  # cap on a step, in expected times: stalls are outliers
    FEW = 4  # steps before anything is expected

    def __init__(self) -> None:
        self._tokens = self._pairs = 0.0  # seconds of each
        # decayed: tokens², tokens·pairs, pairs², tokens·seconds, pairs·seconds
        self._sums: tuple[float, ...] = (0.0,) * 5
        self._steps = 0

    @property
    def known(self) -> bool:
        return self._steps >= self.FEW

    def observe(self, tokens: int, pairs: float, seconds: float) -> None:
        if self.known:
            seconds = min(seconds, self.OUTLIER * self.seconds(tokens, pairs))
        new = (tokens * tokens, tokens * pairs, pairs * pairs, tokens * seconds, pairs * seconds)
        self._sums = tuple(self.KEEP * old + more for old, more in zip(self._sums, new, strict=True))
        self._steps += 1
        self._fit()

    def seconds(self, tokens: int, pairs: float) -> float:
        return self._tokens * tokens + self._pairs * pairs

    def seconds_after(self, context: int, end: int) -> float:
        return self.seconds(end - context, (end - context) * (context + end) / 2)

    def tokens_within(self, seconds: float, context: int) -> int:
        each, half = self._tokens + self._pairs * context, self._pairs / 2
        if seconds <= 0:
            return 0
        if half <= 0 or 4 * half * seconds < 1e-6 * each * each:
            return int(seconds / each) if each else 0
        return int((sqrt(each * each + 4 * half * seconds) - each) / (2 * half))

    def _fit(self) -> None:
        """Solves for the two costs. Neither is less than nothing; with prompts of one length only, tokens tell all."""
        tokens, both, pairs, by_tokens, by_pairs = self._sums
        pairs *= 1.001
        determinant = tokens * pairs - both * both
        self._tokens = max((by_tokens * pairs - by_pairs * both) / determinant, 0.0) if determinant else 0.0
        self._pairs = max((by_pairs - self._tokens * both) / pairs, 0.0) if pairs else 0.0
        if not self._pairs or not self._tokens:
            self._tokens = max((by_tokens - self._pairs * both) / tokens, 0.0)


class CostModel:
    """Forecasts steps: `answers` knows those that only answer, with drafts and without, `prompts` what prompts add.
    Most steps with both take no more than `lateness` times as long as forecast."""

    RISE = 0.8  # share of the excess time: a delay often lasts for several steps
    FALL = 0.01  # decrease with each step in time
    LEAST = 0.25  # least time of prompts, relative to decode only, at any target
    LATENESS = (1.15, 2.0)  # bounds: nobody stops because the machine is busy with something else
    USUAL_ITL = 0.1  # seconds: the target of answers that state none,
    USUAL_STEPS = 12.0  # or this many decode-only steps, if longer: prompts must continue on slow devices

    def __init__(self, answers: StepCost | None = None, *, learns_answers: bool = True) -> None:
        """Leaves decode-only steps to speculation if `learns_answers` is False."""
        self.answers = answers or StepCost()
        self._learns_answers = learns_answers
        self.prompts = PromptCost()
        self.lateness = 1.2
        self.answers_known = False  # a step was measured that only answers
        self.spent_on_prompts = 0.0  # seconds, in all steps

    @property
    def known(self) -> bool:
        return self.prompts.known

    def answer_seconds(self, rows: int, tokens: int) -> float:
        return self.answers.curve(rows, tokens, 0)[0] if rows and self.answers_known else 0.0

    def measured(self, rows: int) -> tuple[float, float, float]:
        """Returns the seconds of a prompt token, of a pair of tokens, and of a decode step with these rows; 0: not
        known yet."""
        prompts = (self.prompts.seconds(1, 0), self.prompts.seconds(0, 1)) if self.known else (0.0, 0.0)
        return *prompts, self.answer_seconds(rows, rows)

    def usual_target(self, rows: int) -> float:
        """Returns the ITL target of rows that state none, in seconds."""
        return max(self.USUAL_ITL, self.USUAL_STEPS * self.answer_seconds(rows, rows))

    def left_for_prompts(self, target: float, rows: int) -> float:
        """Returns how many seconds prompts may add to a step with this ITL target and these decode rows: always some,
        unless no decode-only step was measured yet. If prompts always waited, there would never be one."""
        alone = self.answer_seconds(rows, rows)
        return max(target / self.lateness - alone, self.LEAST * alone) if self.answers_known else 0.0

    def prompt_seconds(self, tokens: int, context: int = 0) -> float:
        """Returns the seconds of a step that only computes `tokens` prompt tokens after `context` others: at least a
        decode step of one row."""
        return max(self.prompts.seconds(tokens, tokens * (context + tokens / 2)), self.answer_seconds(1, 1))

    def observe(self, rows: Iterable[Row], seconds: float) -> None:
        answering = tokens = computed = 0
        pairs = 0.0
        for row in rows:
            if row.count - len(row.draft) > 1:
                computed += row.count
                pairs += row.count * (row.start + row.count / 2)
            else:
                answering += 1
                tokens += row.count
        if computed:
            alone = self.answer_seconds(answering, tokens)
            if answering and self.known and self.answers_known:
                self._compare(seconds, alone + self.prompts.seconds(computed, pairs))
            added = max(seconds - alone, 0.0)
            self.spent_on_prompts += added
            self.prompts.observe(computed, pairs, added)
            return
        self.answers_known = True
        if self._learns_answers:
            self.answers.observe(answering, tokens, seconds)

    def _compare(self, seconds: float, forecast: float) -> None:
        """Follows how much longer than forecast steps take: up nearly at once, and down a little with each."""
        beyond = (seconds / forecast if forecast else 0.0) - self.lateness
        self.lateness += self.RISE * beyond if beyond > 0 else -self.FALL
        self.lateness = min(max(self.lateness, self.LATENESS[0]), self.LATENESS[1])
