"""Decides how many tokens a draft model drafts for each row, before it drafts any: its steps take time, too.

Everything here is pure: it uses neither a clock nor randomness. Times come in as arguments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.core.drafting.lengths import Exploration, StepCost


class DraftSlot(NamedTuple):
    """Stands for a token that could be drafted for a row. Slots are ordered: the likeliest to survive come first, and
    of those as likely, the less deep."""

    loss: float  # minus the probability that it and all before it are accepted
    depth: int
    copied: bool  # which takes no time; False: the model drafts it
    row: int


class BestSlots(NamedTuple):
    """Says how many of some slots give the most tokens per second, how many per second that is, and how many tokens
    the step then verifies."""

    slots: int
    rate: float
    verified: float = 0.0


class DepthPlan(NamedTuple):
    """Says how many tokens a draft model drafts for each row at most. It stops where its own probabilities tell that
    less than `least` of a row's draft survives: that would not pay to be verified."""

    depths: list[int]
    least: float = 0.0


def plan_depths(
    chances: Sequence[Sequence[float]],
    copied: Sequence[Sequence[float]],
    seconds: Sequence[float],
    draft_seconds: Sequence[float],
    rows: int,
    budget: int,
) -> DepthPlan:
    """Returns how many tokens the model drafts for each row, in a step with `rows` rows that drafts at most `budget`
    tokens.

    `chances` has the survival of the model's tokens for each row, `copied` the survival of copied tokens. A row gets
    the better of the two. `seconds` lists the times of the step with 0, 1, ... drafted tokens, `draft_seconds` the
    times of a draft step with 0, 1, ... rows. All surviving tokens of the model are verified, because it knows which
    are likely to survive. The model drafts nothing unless that gives more tokens per second than copies do.
    """
    plain = _slots([()] * len(chances), copied, budget)
    best = _best(plain, seconds, draft_seconds, BestSlots(0, rows / seconds[0]), rows)
    chosen = [mine if sum(mine) > sum(other) else () for mine, other in zip(chances, copied, strict=True)]
    slots = _slots(chosen, [() if mine else other for mine, other in zip(chosen, copied, strict=True)], budget)
    found = _best(slots, seconds, draft_seconds, BestSlots(0, best.rate), rows)
    depths = [0] * len(chances)
    for slot in slots[: found.slots]:
        depths[slot.row] += not slot.copied
    return DepthPlan(depths, _least(found, seconds, draft_seconds, sum(map(bool, depths))))


def _least(best: BestSlots, seconds: Sequence[float], draft_seconds: Sequence[float], drafting: int) -> float:
    """Returns the survival below which neither drafting nor verifying one more token pays, when the model drafts for
    this many rows."""
    if not drafting:
        return 0.0
    verified = max(best.verified, 1.0)
    each = (_at(seconds, verified) - seconds[0]) / verified + draft_seconds[drafting] / drafting
    return min(best.rate * each, 1.0)


def _at(seconds: Sequence[float], tokens: float) -> float:
    below = min(int(tokens), len(seconds) - 1)
    above = min(below + 1, len(seconds) - 1)
    return seconds[below] + (seconds[above] - seconds[below]) * (tokens - below)


def _slots(chances: Sequence[Sequence[float]], copied: Sequence[Sequence[float]], budget: int) -> list[DraftSlot]:
    """Returns the slots that are most likely to survive, in falling order; of those as likely, the less deep first."""
    slots = [
        (-survival, depth, is_copied, row)
        for is_copied, rows in ((False, chances), (True, copied))
        for row, survivals in enumerate(rows)
        for depth, survival in enumerate(survivals)
    ]
    slots.sort()
    return list(map(DraftSlot._make, slots[: max(budget, 0)]))


def _best(
    slots: Sequence[DraftSlot], seconds: Sequence[float], draft_seconds: Sequence[float], best: BestSlots, rows: int
) -> BestSlots:
    """Returns how many of the slots give the most tokens per second, if that is more than `best`. The model drafts the
    tokens of one depth in one step, so the first of a depth costs most. It stops where all that are left, were they as
    likely as the last and took no time, would not give more."""
    gained, drafting, verified = float(rows), 0.0, 0.0
    widths: list[int] = []  # rows of each draft step
    for count, (loss, depth, copied, _) in enumerate(slots, 1):
        gained -= loss
        verified += 1 if copied else -loss
        if not copied:
            widths += [0] * (depth + 1 - len(widths))
            width = widths[depth] = widths[depth] + 1
            drafting += draft_seconds[width] - draft_seconds[width - 1]
        spent = _at(seconds, verified) + drafting
        if gained > best.rate * spent:
            best = BestSlots(count, gained / spent, verified)
        elif gained - loss * (len(slots) - count) <= best.rate * spent:
            break
    return best


class DraftDepths:
    """Chooses how many tokens a draft model drafts, step by step, and learns the cost of its steps.

    While it chooses none, it still drafts for one row now and then, to keep learning survival; the loss stays below a
    share of all time. Conversely, the first steps and an occasional later one are planned without the model, to learn
    their cost. A draft step counts as free until one was measured. A device that pads steps to `shapes` prepares each
    shape, so the first steps of a shape are ignored."""

    PLAIN = 3  # first steps without the model
    EVERY = 64  # steps of which one is without it
    CHUNK = 128  # tokens of a prompt that are taken to be computed at once
    UNREADY = 2  # first steps of a shape

    def __init__(self, shapes: Sequence[int] = ()) -> None:
        self._steps = 0
        self._shapes = sorted(shapes)
        self._seen: Counter[tuple[bool, int]] = Counter()  # steps by whether they only decode, and by shape
        self._cost = StepCost(shapes=shapes)
        self._measured = False
        self._exploration = Exploration()

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        if self._shapes:
            shape = rows == tokens, bisect_left(self._shapes, tokens)
            self._seen[shape] += 1
            if self._seen[shape] <= self.UNREADY:
                return
        self._measured = self._measured or not self._shapes or rows == tokens
        self._cost.observe(rows, tokens, seconds)

    def choose(
        self,
        chances: Sequence[Sequence[float]],
        copied: Sequence[Sequence[float]],
        seconds: Sequence[float],
        rows: int,
        budget: int,
        behind: Sequence[int],
    ) -> DepthPlan:
        """Returns how many tokens to draft for each row: see `plan_depths`. The model would first have to compute
        `behind` tokens of each row."""
        self._steps += 1
        if self._steps <= self.PLAIN or self._steps % self.EVERY == 0:
            return DepthPlan([0] * len(chances))
        draft_seconds = self._draft_seconds(len(chances))
        plan = plan_depths(chances, copied, seconds, draft_seconds, rows, budget)
        if not any(plan.depths):
            row = max(range(len(chances)), key=lambda at: sum(chances[at]))
            most = min(len(chances[row]), max(budget, 0))
            first = self._catching_up(behind[row])
            tried = [seconds[count] + count * draft_seconds[1] + first * (count > 0) for count in range(most + 1)]
            plan.depths[row] = self._exploration.count(0, tried, 1.0)
        return plan

    def _catching_up(self, tokens: int) -> float:
        if not self._measured:
            return 0.0
        whole, rest = divmod(tokens, self.CHUNK)
        curve = self._cost.curve(1, 1, self.CHUNK)
        return whole * curve[self.CHUNK] + curve[rest] - curve[0]

    def _draft_seconds(self, rows: int) -> list[float]:
        if not self._measured:
            return [0.0] * (rows + 1)
        found = [0.0]
        for count in range(1, rows + 1):
            found.append(max(found[-1], self._cost.curve(count, count, 0)[0]))
        return found
