"""Forecasts how long a step takes, from steps that were measured: what its answers cost, and what prompts add.

Everything here is pure: it has no clock. Times come in as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from penstock.core.drafting.lengths import StepCost
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
        """Returns how many seconds the tokens from `context` to `end` of one prompt take."""
        return self.seconds(end - context, (end - context) * (context + end) / 2)

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

    RISE = 0.8  # of what a step took beyond that: what holds one step up holds up the next ones
    FALL = 0.01  # with each step that did not
    LEAST = 0.25  # of the time of the answers alone that prompts may add to a step, whatever the target
    LATENESS = (1.15, 2.0)  # bounds: nobody stops because the machine is busy with something else
    USUAL_ITL = 0.1  # seconds: the target of answers that state none,
    USUAL_STEPS = 12.0  # or the time of so many steps that only answer, if that is more: prompts go on on slow devices

    def __init__(self, answers: StepCost | None = None, *, learns_answers: bool = True) -> None:
        """A drafter measures the steps that only answer, if `learns_answers` is False."""
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
        """Returns the seconds of a step in which so many rows answer and compute so many tokens; 0: not known yet."""
        return self.answers.curve(rows, tokens, 0)[0] if rows and self.answers_known else 0.0

    def measured(self, rows: int) -> tuple[float, float, float]:
        """Returns the seconds of a prompt's token, of a pair of such, and of a step that answers so many rows. What is
        not known yet is 0."""
        prompts = (self.prompts.seconds(1, 0), self.prompts.seconds(0, 1)) if self.known else (0.0, 0.0)
        return *prompts, self.answer_seconds(rows, rows)

    def usual_target(self, rows: int) -> float:
        """Returns the seconds from one token to the next that so many rows are to have if they state no target."""
        return max(self.USUAL_ITL, self.USUAL_STEPS * self.answer_seconds(rows, rows))

    def left_for_prompts(self, target: float, rows: int) -> float:
        """Returns how many seconds prompts may add to a step that is to take as long as the target while so many rows
        answer: some in any case, unless no step was measured yet that only answers. Where prompts always wait, there
        would never be one."""
        alone = self.answer_seconds(rows, rows)
        return max(target / self.lateness - alone, self.LEAST * alone) if self.answers_known else 0.0

    def prompt_seconds(self, tokens: int, context: int = 0) -> float:
        """Returns the seconds of a step that computes so many tokens of a prompt, after `context` others, and nothing
        else: no fewer than those of a step that answers one row."""
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
