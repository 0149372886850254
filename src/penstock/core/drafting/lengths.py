"""Decides how many tokens to draft, by the survival of drafts and the cost of steps.

Everything here is pure: it uses neither a clock nor randomness. Times come in as arguments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import exp
from operator import add, mul, neg
from typing import NamedTuple

from penstock.core.drafting.suffixes import ALIKE, DIFFERENT


class Proposal(NamedTuple):
    """Holds tokens that may come next. `survival` has, for each, the probability that it and all before it are
    accepted."""

    tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    source: str = ""
    match: int = 0  # tokens before the draft that agree with the place it was taken from
    cells: tuple[int, ...] = ()  # where the acceptance of each token is learned

    def first(self, count: int) -> Proposal:
        return Proposal(self.tokens[:count], self.survival[:count], self.source, self.match, self.cells[:count])


NOTHING = Proposal()

MOST = 64  # tokens of one draft
MATCHES = (0, 1, 2, 3, 4, 5, 7, 10, 14, 20, 32, 64)  # the shortest match of each bucket
AGREEMENTS = 3
PREDICTED = 8  # matching tokens that the beginning of a prediction counts as
FLOOR = 0.03  # a draft ends where fewer of its tokens survive
HAZARD_BOUND = 3.0  # step of a hazard's logarithm
HAZARD_STEP = 1 / 8  # resolution of hazards
SPAN = 1.5  # times the smallest measured size that the largest is before they tell how steps grow

_FIRST_CELL = [
    AGREEMENTS * max(bucket for bucket, first in enumerate(MATCHES) if first <= match)
    for match in range(MATCHES[-1] + MOST + 1)
]


def cells_of(match: int, agreements: Sequence[int]) -> tuple[int, ...]:
    """Returns the cell of each token of a draft. A cell is a bucket of matches and an agreement. Accepted draft tokens
    count like tokens that matched before the draft."""
    first = min(match, MATCHES[-1])
    return tuple(map(add, _FIRST_CELL[first : first + len(agreements)], agreements))


class Acceptance:
    """Learns how often drafted tokens are accepted after all before them were, by source and cell.

    Counts decay, so that what happened lately counts most. Before anything has happened, a prior stands for `weight`
    observations of each cell."""

    REFRESH = 16  # observations after which the rates in use are computed again

    def __init__(self, *, weight: float = 16.0, memory: int = 2048) -> None:
        self._weight, self._keep = weight, 1 - 1 / memory
        self._counts: dict[str, AcceptanceCounts] = {}

    def rates(self, source: str, power: int) -> list[float]:
        """Returns the rate of each cell, to the power of a stream's hazard. The hazard's logarithm is given in
        steps."""
        counts = self._of(source)
        found = counts.rates.get(power)
        if found is None:
            hazard = exp(power * HAZARD_STEP)
            pairs = zip(counts.accepted, counts.tried, strict=True)
            found = counts.rates[power] = [(accepted / tried) ** hazard for accepted, tried in pairs]
        return found

    def observe(self, source: str, cells: Sequence[int], rejected: bool) -> None:
        """Learns from tokens with these cells: all were accepted, but if `rejected`, the last was not."""
        counts = self._of(source)
        for cell in cells:
            counts.accepted[cell] = counts.accepted[cell] * self._keep + 1
            counts.tried[cell] = counts.tried[cell] * self._keep + 1
        if rejected:
            counts.accepted[cells[-1]] -= 1
        counts.fresh += len(cells)
        if counts.fresh >= self.REFRESH:
            counts.fresh = 0
            counts.rates.clear()

    def _of(self, source: str) -> AcceptanceCounts:
        if source not in self._counts:
            self._counts[source] = AcceptanceCounts(self._weight)
        return self._counts[source]


class AcceptanceCounts:
    """Counts accepted and rejected tokens of one source by cell, and derives rates."""

    __slots__ = ("accepted", "fresh", "rates", "tried")

    def __init__(self, weight: float) -> None:
        self.tried = [weight] * (AGREEMENTS * len(MATCHES))
        self.accepted = [weight * prior_rate(cell) for cell in range(len(self.tried))]
        self.fresh = 0  # observations since the rates were computed
        self.rates: dict[int, list[float]] = {}


def prior_rate(cell: int) -> float:
    """Returns how likely a drafted token is accepted before anything was learned.

    It was fitted to edits, agents' turns, prose and a small model's answers. The beginning of a prediction has no
    match, but counts for some because the client predicts it."""
    match, agreement = MATCHES[cell // AGREEMENTS] or PREDICTED, cell % AGREEMENTS
    if agreement == DIFFERENT:
        return 0.25
    rejected = 2 / (match + 1.75)
    return 1 - (rejected / 2 if agreement == ALIKE else rejected)


class StreamAcceptance:
    """Blends what all streams have shown with what this one shows.

    If others accept a token with probability p, this stream does with p to the power of its hazard. It has a hazard for
    each source, which follows every observation. So a stream that copies nothing and one that copies everything do not
    spoil each other's drafts."""

    RATE = 0.1

    def __init__(self, shared: Acceptance) -> None:
        self._shared = shared
        self._hazards: dict[str, float] = {}  # logarithms

    def survival(self, source: str, cells: Sequence[int]) -> tuple[float, ...]:
        """Returns the probability that each token of a draft and all before it are accepted, down to the floor but
        for at least one token."""
        survival = tuple(accumulate(map(self._rates(source).__getitem__, cells), mul))
        return survival[: max(1, bisect_left(survival, -FLOOR, key=neg))]

    def observe(self, proposal: Proposal, depth: int, accepted: int, rejected: bool) -> None:
        """Learns from draft tokens from `depth` on: `accepted` of them were accepted, and the next was rejected or is
        unknown."""
        source, cells = proposal.source, proposal.cells[depth : depth + accepted + rejected]
        rates = self._rates(source)
        surplus = sum([rates[cell] for cell in cells]) - accepted
        hazard = self._hazards.get(source, 0.0) + self.RATE * surplus
        self._hazards[source] = min(max(hazard, -HAZARD_BOUND), HAZARD_BOUND)
        self._shared.observe(source, cells, rejected)

    def _rates(self, source: str) -> list[float]:
        return self._shared.rates(source, round(self._hazards.get(source, 0.0) / HAZARD_STEP))


class StepCost:
    """Learns the seconds of a step from steps that were measured.

    If a device pads steps to `shapes`, decode-only steps (one token a row) are kept separate: the device may compute
    them differently. No size costs more than a larger one. Between two measured sizes seconds are interpolated, and
    they never fall with more tokens. Beyond the largest measured size they rise at the same rate; with too few sizes
    measured, every token adds `slope` times the smallest known step."""

    WEIGHT = 1 / 32  # weight of a new measurement, once there are enough
    OUTLIER = 1.5  # cap on a step, in means: stalls are outliers
    CHANGE = 0.02  # relative change that replaces the mean in use

    def __init__(self, *, slope: float = 0.15, shapes: Sequence[int] = ()) -> None:
        self._slope, self._shapes = slope, sorted(shapes)
        self._means: dict[tuple[bool, int], float] = {}  # keys: decode-only or not, size
        self._counts: dict[tuple[bool, int], int] = {}
        self._used: dict[tuple[bool, int], float] = {}
        self._curves: dict[tuple[int, int], list[float]] = {}

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        decodes = tokens == rows and bool(self._shapes)
        key = (decodes, rows if decodes else self._size(tokens))
        mean, count = self._means.get(key, self._expected(rows, tokens, seconds)), self._counts.get(key, 0) + 1
        mean += max(self.WEIGHT, 1 / count) * (min(seconds, self.OUTLIER * mean) - mean)
        self._means[key], self._counts[key] = mean, count
        if abs(mean - self._used.get(key, 0.0)) > self.CHANGE * mean:
            self._used[key] = mean
            self._curves.clear()

    def _expected(self, rows: int, tokens: int, seconds: float) -> float:
        """Returns the expected seconds for the first step of a size, because a padding device prepares the size in it;
        its own `seconds` if nothing is known yet."""
        known = self._used and self._shapes
        return self.curve(rows, rows, tokens - rows)[tokens - rows] if known else seconds

    @property
    def least(self) -> float:
        return min([self.curve(1, 1, 0)[0], *self._used.values()])

    def curve(self, rows: int, tokens: int, most: int) -> list[float]:
        """Returns the seconds of a step with `tokens` tokens and of steps with 1, 2, ... more, `most` at least."""
        found = self._curves.get((rows, tokens))
        if found is None or len(found) <= most:
            most = max(most, 2 * len(found or ()))
            found = self._curves[rows, tokens] = self._compute(rows, tokens, most)
        return found

    def _size(self, tokens: int) -> int:
        """Returns the size that a number of tokens is measured as: a padded shape, or the end of an eighth of an
        octave."""
        at = bisect_left(self._shapes, tokens)
        if at < len(self._shapes):
            return self._shapes[at]
        width = max(1, 1 << (tokens - 1).bit_length() >> 4)
        return -(-tokens // width) * width

    def _compute(self, rows: int, tokens: int, most: int) -> list[float]:
        slope = self._slope * min(self._used.values(), default=1.0)
        decoding = sorted((size, mean) for (decode, size), mean in self._used.items() if decode)
        others = sorted((size, mean) for (decode, size), mean in self._used.items() if not decode)
        if self._shapes:  # a size that was measured while something held the device up is tried again
            lowest = accumulate((mean for _, mean in reversed(others)), min)
            others = [*zip((size for size, _ in others), reversed([*lowest]), strict=True)]
        rise = _rise(others, slope)
        if tokens == rows and self._shapes:
            first = _interpolate(decoding, rows, slope, _rise(decoding, slope)) if decoding else 1.0
            others = [(rows, first), *(known for known in others if known[0] > rows)]
        elif not others:
            others = decoding or [(tokens, 1.0)]
        sizes = [tokens, *(self._size(tokens + more) for more in range(1, most + 1))]
        seconds = {size: _interpolate(others, size, slope, rise) for size in dict.fromkeys(sizes)}
        return list(accumulate(map(seconds.__getitem__, sizes), max))


def _rise(known: Sequence[tuple[int, float]], slope: float) -> float:
    """Returns the seconds that one more token adds beyond the largest size, by the slope between the smallest and the
    largest. If they are too close, `slope` is used: a guess that is too low is corrected by the first try."""
    if not known or known[-1][0] < SPAN * known[0][0]:
        return slope
    (first, lowest), (last, highest) = known[0], known[-1]
    return max((highest - lowest) / (last - first), slope / 4)


def _interpolate(known: Sequence[tuple[int, float]], size: int, slope: float, rise: float) -> float:
    """Returns the seconds at a size, given those at some sizes in rising order. Below the smallest, `slope` is taken
    off for each token, but seconds stay at least in proportion. Beyond the largest, each token adds `rise`."""
    at = bisect_left(known, (size,))
    if at == len(known):
        last, highest = known[-1]
        return highest + rise * (size - last)
    above, upper = known[at]
    if at == 0:
        return max(upper - slope * (above - size), upper * size / above)
    below, lower = known[at - 1]
    return lower + (upper - lower) * (size - below) / (above - below)


class Exploration:
    """Now and then has a step draft more than is best, or nothing, so that the cost of such steps is measured.

    What that is expected to lose stays below a share of all time. Survival needs no exploration: it is learned from
    every proposal, drafted or not."""

    SHARE = 1 / 400
    FURTHER = (1, 2, 4, 8, 16, None)  # tokens beyond the best, in turn; None: nothing is drafted

    def __init__(self) -> None:
        self._saved = 0.0  # seconds that may be lost
        self._count = 0

    def count(self, best: int, seconds: Sequence[float], gain: float) -> int:
        """Returns how many tokens to draft in all, given the best number, the seconds of steps with 0, 1, ... of them,
        and how many times as fast the best is as none."""
        further = self.FURTHER[self._count % len(self.FURTHER)]
        count = 0 if further is None else min(best + further, len(seconds) - 1)
        self._saved = min(self._saved + self.SHARE * seconds[best], seconds[-1])
        lost = seconds[0] * (1 - 1 / gain) if further is None else seconds[count] - seconds[best]
        if self._saved < lost:
            return best
        self._saved -= lost
        self._count += 1
        return count


def draft_lengths(
    proposals: Sequence[Proposal],
    cost: StepCost,
    rows: int,
    tokens: int,
    budget: int,
    exploration: Exploration | None = None,
) -> list[int]:
    """Returns how many tokens to draft of each proposal, in a step that has `rows` rows that decode and `tokens` tokens
    without drafts.

    The drafted tokens that are most likely to survive are admitted, over all rows, as long as that gives the most
    committed tokens per second. Exploration may add a few. There are at most `budget`."""
    slots = _slots(proposals, budget)
    if not slots:
        return [0] * len(proposals)
    seconds = cost.curve(rows, tokens, len(slots))
    count = _best_count(slots, seconds, rows)
    if exploration is not None:
        gain = (1 + sum(slots[:count]) / rows) * seconds[0] / seconds[count]
        count = exploration.count(count, seconds[: len(slots) + 1], gain)
    return _admit(proposals, slots[:count])


def _slots(proposals: Sequence[Proposal], budget: int) -> list[float]:
    slots = [survival for proposal in proposals for survival in proposal.survival]
    slots.sort(reverse=True)
    return slots[: max(budget, 0)]


def _best_count(slots: Sequence[float], seconds: Sequence[float], rows: int) -> int:
    """Returns how many of the slots give the most tokens per second. All counts are tried that could, because seconds
    may rise in steps."""
    best, rate = 0, rows / seconds[0]
    gained, most = float(rows), rows + sum(slots)
    for count, survival in enumerate(slots, 1):
        gained += survival
        if gained > rate * seconds[count]:
            best, rate = count, gained / seconds[count]
        elif most <= rate * seconds[count]:
            break
    return best


def _admit(proposals: Sequence[Proposal], admitted: Sequence[float]) -> list[int]:
    """Returns the lengths that admit this many slots. Among equally likely slots, the first rows win."""
    if not admitted:
        return [0] * len(proposals)
    least = admitted[-1]
    lengths = [bisect_left(proposal.survival, -least, key=neg) for proposal in proposals]
    left = len(admitted) - sum(lengths)
    for row, proposal in enumerate(proposals):
        if not left:
            break
        taken = min(proposal.survival.count(least), left)
        lengths[row] += taken
        left -= taken
    return lengths
