"""Decides whether another replica computes a prompt than the one that answers, and which.

While a replica computes a long prompt, its answers wait. If that would miss the ITL target often, one or more replicas
are put on duty: they compute long prompts, whose blocks the others read, and do not answer. A duty ends when long
prompts become rare.

An engine that knows the target computes the part of a prompt that fits into each step with its answers. Then answers
never wait, but the prompt does. A duty is worth it if a prompt would miss its TTFT target in that way, or if prompts
come faster than they are computed. An engine that does not know the target is bound only by its prefill budget and the
usual target, which may take too long.

The rule is pure: times come in, in milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import exp
from typing import NamedTuple

from penstock.core.policy import FEW_STEPS, ROUND
from penstock.core.step_cost import CostModel
from penstock.fleet.ledger import Load
from penstock.fleet.timing import MARGIN, EngineTiming
from penstock.types import prefill_budget

MEMORY_MS = 10_000.0  # in which long prompts are remembered
QUIET_MS = 2_000.0  # in which nobody is answered or waits, after which nobody has to be spared
RARE = 0.05  # share of a replica's time that long prompts take, below which nobody is on duty
SHORT_TOKENS = 128  # shorter prompts are never computed elsewhere: asking takes longer
FEWER = 2  # rows that another replica must have less, to take a duty over
FULL = 0.8  # prompt load, as a share of the time left by answers, at which prompts pile up

SPLIT = "split"
NO_TARGET, SHORT, IN_TIME, IDLE = "no_target", "short", "in_time", "idle"
FEW, DEAR, QUEUE = "few_replicas", "dear_transfer", "queue"


class SplitOptions(NamedTuple):
    """Says for whom prompts are computed elsewhere."""

    itl_ms: float = 0.0  # target of requests that name none; 0: they have none
    prefill_replicas: int = 0  # replicas always on duty; 0: as the load requires
    told: bool = False  # engines know that target, also of requests that name none


class PromptToSplit(NamedTuple):
    """Describes the prompt of a request, and its targets in milliseconds; None: it names none."""

    uncached: int  # tokens
    cached: int = 0  # tokens before them, which the replica that answers holds
    ttft_ms: float | None = None
    itl_ms: float | None = None


class SplitRule:
    """Keeps who is on duty, and counts its decisions by reason."""

    def __init__(self, options: SplitOptions | None = None) -> None:
        self._options = options or SplitOptions()
        self.decisions: Counter[str] = Counter()
        self._long_ms = 0.0  # prompts to compute elsewhere, decayed
        self._prompt_ms = 0.0  # all prompts except short ones, decayed
        self._at = 0.0
        self._answering = -QUIET_MS  # when a replica had requests last
        self.duty: tuple[int, ...] = ()  # who is on duty, as was found last

    def on_duty(self, loads: Mapping[int, Load], now: float) -> frozenset[int]:
        self._decay(now)
        if any(load.rows or load.waiting for load in loads.values()):  # those that wait behind prompts are to be spared
            self._answering = now
        share = self._long_ms / MEMORY_MS
        count = self._options.prefill_replicas or (0 if share < RARE else max(round(share), 1))
        count = min(count, len(loads) - 1)
        if count <= 0:
            self.duty = ()
            return frozenset()
        by_rows = sorted(loads, key=lambda replica: (loads[replica].rows - FEWER * (replica in self.duty), replica))
        self.duty = tuple(by_rows[:count])
        return frozenset(self.duty)

    def decide(
        self, prompt: PromptToSplit, replica: int, loads: Mapping[int, Load], timing: EngineTiming, now: float
    ) -> int | None:
        """Returns the replica that is to compute a prompt which `replica` is to answer; None: that one does."""
        reason, chosen = self._decide(prompt, replica, loads, timing, now)
        self.decisions[reason] += 1
        return chosen

    def _decide(
        self, prompt: PromptToSplit, replica: int, loads: Mapping[int, Load], timing: EngineTiming, now: float
    ) -> tuple[str, int | None]:
        uncached = prompt.uncached
        target = self._options.itl_ms if prompt.itl_ms is None else prompt.itl_ms
        if not target:
            return NO_TARGET, None
        if uncached < SHORT_TOKENS or timing.decode_ms(0.0) + timing.prefill_ms(uncached) <= target:
            return SHORT, None
        alone = timing.prompt_ms(uncached, prompt.cached)
        self._decay(now)
        self._prompt_ms += alone
        rows, queued = loads[replica].rows, max(loads[replica].queued - uncached, 0)  # the ledger has this prompt
        harm = alone * max(rows, 1)
        if prompt.itl_ms is not None or self._options.told:
            share = share_for_prompts(target, timing)
            here = (timing.prompt_ms(queued) + alone) / (share if rows else 1.0)
            late = prompt.ttft_ms is not None and here > max(prompt.ttft_ms, MARGIN * alone)
            in_time = not late and self._prompt_ms / MEMORY_MS <= FULL * share * len(loads)
            harm = here - alone if late or in_time else harm
        else:
            in_time = longest_step(uncached, rows, timing) <= target
        if not in_time or self._options.prefill_replicas:
            self._long_ms += alone
        elif not self.duty:  # a replica on duty has nothing else to do, whoever needs it
            return IN_TIME, None
        others = [each for each in self.duty if each in loads and each != replica]
        if not others:
            return FEW, None
        if now - self._answering > QUIET_MS:
            return IDLE, None
        pull = uncached * timing.pull_ms_per_token
        if pull >= alone:
            return DEAR, None
        best = min(others, key=lambda each: (loads[each].queued, each))
        return (SPLIT, best) if timing.prompt_ms(loads[best].queued) + pull < harm else (QUEUE, None)

    def _decay(self, now: float) -> None:
        kept = exp(-max(now - self._at, 0.0) / MEMORY_MS)
        self._long_ms *= kept
        self._prompt_ms *= kept
        self._at = now


def share_for_prompts(itl_ms: float, timing: EngineTiming) -> float:
    answers = timing.decode_ms(0.0)
    beside = max(itl_ms / MARGIN - answers, CostModel.LEAST * answers)
    return beside / (beside + answers) if answers else 1.0


def longest_step(uncached: int, rows: int, timing: EngineTiming) -> float:
    """Returns the longest step in milliseconds in which an engine without the target computes a prompt of `uncached`
    tokens with `rows` answers: within its prefill budget, or more for a long prompt, and within the usual target
    (core/policy.py)."""
    answers = timing.decode_ms(0.0)
    if not 0 < timing.prefill_budget < timing.step_tokens:
        return answers + _last_part_ms(uncached, timing.step_tokens, timing)
    tokens = prefill_budget(timing.prefill_budget, max(rows, 1))
    if uncached > FEW_STEPS * tokens:
        tokens = -(-(uncached // FEW_STEPS + rows) // ROUND) * ROUND
    longest = answers + _last_part_ms(uncached, min(tokens, timing.step_tokens), timing)
    return min(longest, timing.usual_itl_ms())


def _last_part_ms(uncached: int, tokens: int, timing: EngineTiming) -> float:
    """Returns the milliseconds of the last `tokens` tokens of a prompt, which attend to all before them."""
    return timing.prefill_ms(uncached) - timing.prefill_ms(max(uncached - tokens, 0))
