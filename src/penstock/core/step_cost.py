"""Forecasts how long a step takes, from steps that were measured: what its answers cost, and what prompts add.

Everything here is pure: it has no clock. Times come in as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from penstock.core.speculation import StepCost
from penstock.types import Row


class PromptCost:
    """Learns the seconds that prompts add to a step: so many for each token, and so many for each pair of a token and
    one before it, which is what attention computes. Both are fitted to the latest steps by least squares."""

    KEEP = 0.95  # of the weight of all earlier steps, with each new one
    OUTLIER = 1.5  # a step counts at most this many times what was expected: a process that was held up tells nothing
    FEW = 4  # steps before anything is expected

    def __init__(self) -> None:
        self._tokens = self._pairs = 0.0  # seconds of each
        # decayed: tokens², tokens·pairs, pairs², tokens·seconds, pairs·seconds
        self._sums: tuple[float, ...] = (0.0,) * 5
        self._steps = 0

    @property
    def known(self) -> bool:
        """Returns whether enough was measured to forecast anything."""
        return self._steps >= self.FEW

    def observe(self, tokens: int, pairs: float, seconds: float) -> None:
        """Learns from a step to which prompts of so many tokens and pairs added so many seconds."""
        if self.known:
            seconds = min(seconds, self.OUTLIER * self.seconds(tokens, pairs))
        new = (tokens * tokens, tokens * pairs, pairs * pairs, tokens * seconds, pairs * seconds)
        self._sums = tuple(self.KEEP * old + more for old, more in zip(self._sums, new, strict=True))
        self._steps += 1
        self._fit()

    def seconds(self, tokens: int, pairs: float) -> float:
        """Returns how many seconds prompts of so many tokens and pairs add to a step."""
        return self._tokens * tokens + self._pairs * pairs

    def tokens_within(self, seconds: float, context: int) -> int:
        """Returns how many tokens after `context` others can be computed in so many seconds."""
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

    MOST = 0.95  # share of steps: a quantile is followed, so that bursts of other load shorten the steps planned next
    PACE = 0.05  # by how much a step changes the quantile at most
    LATENESS = (1.05, 2.0)  # bounds: nobody stops because the machine is busy with something else

    def __init__(self, answers: StepCost | None = None) -> None:
        self.answers = answers or StepCost()
        self.prompts = PromptCost()
        self.lateness = 1.1
        self._answers_known = False

    @property
    def known(self) -> bool:
        """Returns whether both parts were measured."""
        return self._answers_known and self.prompts.known

    def answer_seconds(self, rows: int, tokens: int) -> float:
        """Returns the seconds of a step in which so many rows answer and compute so many tokens; 0: not known yet."""
        return self.answers.curve(rows, tokens, 0)[0] if rows and self._answers_known else 0.0

    def observe(self, rows: Iterable[Row], seconds: float, *, answers: bool) -> None:
        """Learns from a step with these rows. With `answers`, one that has no prompt is learned too; without, whoever
        drafts has learned from it."""
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
            if answering and self.known:
                self._compare(seconds, alone + self.prompts.seconds(computed, pairs))
            self.prompts.observe(computed, pairs, max(seconds - alone, 0.0))
            return
        self._answers_known = True
        if answers:
            self.answers.observe(answering, tokens, seconds)

    def _compare(self, seconds: float, forecast: float) -> None:
        """Follows how much longer than forecast most steps take."""
        late = seconds > self.lateness * forecast
        self.lateness += self.PACE * (late - 1 + self.MOST)
        self.lateness = min(max(self.lateness, self.LATENESS[0]), self.LATENESS[1])
