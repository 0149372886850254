"""Decides how many tokens to draft: how likely drafts survive, what a step costs, and which drafts pay.

Everything here is pure: it has no clock and no randomness. Times come in as arguments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import exp
from operator import mul, neg
from typing import NamedTuple


class Proposal(NamedTuple):
    """Holds tokens that may come next. `survival` has, for each, the probability that it and all before it are
    accepted."""

    tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    source: str = ""
    match: int = 0  # tokens before the draft that agree with the place it was taken from

    def first(self, count: int) -> Proposal:
        """Returns it cut to its first tokens."""
        return self._replace(tokens=self.tokens[:count], survival=self.survival[:count])


NOTHING = Proposal()

MATCHES = (0, 1, 2, 3, 4, 5, 7, 10, 14, 20, 32, 64)  # the shortest match of each bucket
DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # the first depth of each class
MOST = 64  # tokens of one draft
FLOOR = 0.03  # a draft ends where fewer of its tokens survive
HAZARD_BOUND = 3.0  # of a hazard's logarithm
HAZARD_STEP = 1 / 8  # hazards are told apart this finely

_BUCKET = tuple(max(at for at, first in enumerate(MATCHES) if first <= match) for match in range(MATCHES[-1] + 1))
_CLASS = tuple(max(at for at, first in enumerate(DEPTHS) if first <= depth) for depth in range(MOST))


class Outcomes(NamedTuple):
    """Counts what became of drafted tokens in one class of depths."""

    depths: int
    accepted: int
    tried: int


def outcomes(depth: int, accepted: int, rejected: bool) -> list[Outcomes]:
    """Returns what became of the tokens of a draft, from `depth` on, by classes of depths."""
    found, end = [], depth + accepted + rejected
    while depth < end:
        at = _CLASS[depth]
        stop = min(end, DEPTHS[at + 1]) if at + 1 < len(DEPTHS) else end
        found.append(Outcomes(at, stop - depth - (rejected and stop == end), stop - depth))
        depth = stop
    return found


def bucket_of(match: int) -> int:
    """Returns the bucket of matches of this length."""
    return _BUCKET[min(match, MATCHES[-1])]


class Acceptance:
    """Learns how often drafted tokens are accepted, by source, length of the match and depth in the draft.

    Counts decay, so that what happened lately counts most. Before anything has happened, a prior stands for `weight`
    observations of each cell."""

    REFRESH = 16  # observations after which survival is computed again; sooner while there are few

    def __init__(self, *, weight: float = 8.0, memory: int = 512) -> None:
        self._weight, self._keep = weight, 1 - 1 / memory
        self._cells: dict[tuple[str, int], AcceptanceCells] = {}

    def survival(self, source: str, bucket: int, power: int) -> tuple[float, ...]:
        """Returns the probability that each token of a draft and all before it are accepted, down to the floor but
        for at least one. A stream's rates are those of all, to the power of its hazard, which is given as the
        logarithm's number of steps."""
        cells = self._cells_of(source, bucket)
        found = cells.survival.get(power)
        if found is None:
            rates = [(accepted / tried) ** exp(power * HAZARD_STEP) for accepted, tried in cells.counts]
            lasting = list(accumulate([rates[at] for at in _CLASS], mul))
            found = cells.survival[power] = tuple(lasting[: max(1, bisect_left(lasting, -FLOOR, key=neg))])
        return found

    def observe(self, source: str, bucket: int, outcomes: Sequence[Outcomes], hazard: float) -> float:
        """Learns from tokens of a draft. Returns how many more of them a stream with this hazard was expected to accept
        than it did."""
        cells = self._cells_of(source, bucket)
        surplus = 0.0
        for at, accepted, tried in outcomes:
            count, keep = cells.counts[at], self._keep**tried
            surplus += tried * (count[0] / count[1]) ** hazard - accepted
            count[0] = count[0] * keep + accepted
            count[1] = count[1] * keep + tried
            cells.fresh += tried
            if cells.fresh > self.REFRESH or count[1] < 4 * self._weight:
                cells.survival.clear()
                cells.fresh = 0
        return surplus

    def _cells_of(self, source: str, bucket: int) -> AcceptanceCells:
        cells = self._cells.get((source, bucket))
        if cells is None:
            weight = self._weight
            counts = [[weight * prior_rate(bucket, depth), weight] for depth in DEPTHS]
            cells = self._cells[source, bucket] = AcceptanceCells(counts)
        return cells


class AcceptanceCells:
    """Holds counts (accepted, tried) by depth, of one source and one bucket of matches, and survival made of them."""

    __slots__ = ("counts", "fresh", "survival")

    def __init__(self, counts: list[list[float]]) -> None:
        self.counts = counts
        self.fresh = 0  # observations since survival was computed
        self.survival: dict[int, tuple[float, ...]] = {}


def prior_rate(bucket: int, depth: int) -> float:
    """Returns how likely a drafted token is accepted before anything was learned: the more, the longer the match, and
    more again once tokens before it were accepted."""
    return 1 - 0.7 / (1 + 0.5 * MATCHES[bucket] + 0.5 * depth)


class StreamAcceptance:
    """Blends what all streams have shown with what this one shows.

    If others accept a token with probability p, this stream does with p to the power of its hazard. It has one hazard
    for short matches and one for long ones, which follow every observation. So a stream that copies nothing and one
    that copies everything do not spoil each other's drafts."""

    RATE = 0.15
    LONG = 5  # the first bucket of long matches

    def __init__(self, shared: Acceptance) -> None:
        self._shared = shared
        self._hazards: dict[tuple[str, bool], float] = {}  # logarithms

    def survival(self, source: str, match: int) -> tuple[float, ...]:
        """Returns the probability that each token of a draft and all before it are accepted."""
        bucket = bucket_of(match)
        hazard = self._hazards.get((source, bucket >= self.LONG), 0.0)
        return self._shared.survival(source, bucket, round(hazard / HAZARD_STEP))

    def observe(self, source: str, match: int, depth: int, accepted: int, rejected: bool) -> None:
        """Learns from tokens of a draft, from `depth` on: so many were accepted, and one after them was rejected or
        is not known."""
        bucket = bucket_of(match)
        key = (source, bucket >= self.LONG)
        hazard = self._hazards.get(key, 0.0)
        hazard += self.RATE * self._shared.observe(source, bucket, outcomes(depth, accepted, rejected), exp(hazard))
        self._hazards[key] = min(max(hazard, -HAZARD_BOUND), HAZARD_BOUND)


class StepCost:
    """Learns the seconds of a step from steps that were measured.

    Steps that only decode (one token a row) are kept apart from those with more tokens, which a device may compute in
    another way. Between two measured sizes seconds are interpolated, and they never fall with more tokens. Beyond what
    was measured they rise as they did before; as long as only one size was, every token adds `slope` times the smallest
    known step."""

    WEIGHT = 1 / 16  # of a new measurement
    OUTLIER = 2.0  # a step counts at most this many times the mean: a process that was held up tells nothing
    CHANGE = 0.02  # by which a mean must differ from the one in use to replace it

    def __init__(self, *, slope: float = 0.15, shapes: Sequence[int] = ()) -> None:
        """Begins with a prior. `shapes` are the numbers of tokens that a device pads a step to."""
        self._slope, self._shapes = slope, sorted(shapes)
        self._means: dict[tuple[bool, int], float] = {}  # by whether it only decodes, and by size
        self._used: dict[tuple[bool, int], float] = {}
        self._curves: dict[tuple[int, int], list[float]] = {}

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Learns from a step that took so many seconds."""
        key = (True, rows) if tokens == rows else (False, self._size(tokens))
        mean = self._means.get(key, seconds)
        mean += self.WEIGHT * (min(seconds, self.OUTLIER * mean) - mean)
        self._means[key] = mean
        if abs(mean - self._used.get(key, 0.0)) > self.CHANGE * mean:
            self._used[key] = mean
            self._curves.clear()

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
        if tokens == rows:
            first = _interpolate(decoding, rows, slope) if decoding else 1.0
            others = [(rows, first), *(known for known in others if known[0] > rows)]
        elif not others:
            others = decoding or [(tokens, 1.0)]
        sizes = [tokens, *(self._size(tokens + more) for more in range(1, most + 1))]
        return list(accumulate((_interpolate(others, size, slope) for size in sizes), max))


def _interpolate(known: Sequence[tuple[int, float]], size: int, slope: float) -> float:
    """Returns the seconds at a size, given those at some sizes in rising order. Below the smallest, `slope` is taken
    off for each token, but seconds stay at least in proportion. Beyond the largest they rise as between the smallest
    and the largest: a guess that is too low is tried once and then known."""
    at = bisect_left(known, (size,))
    (first, lowest), (last, highest) = known[0], known[-1]
    if at == len(known):
        rise = (highest - lowest) / (last - first) if last > first else slope
        return highest + max(rise, slope / 4) * (size - last)
    above, upper = known[at]
    if at == 0:
        return max(upper - slope * (above - size), upper * size / above)
    below, lower = known[at - 1]
    return lower + (upper - lower) * (size - below) / (above - below)


def draft_lengths(
    proposals: Sequence[Proposal], cost: StepCost, rows: int, tokens: int, budget: int, further: int = 0
) -> list[int]:
    """Returns how many tokens to draft of each proposal, in a step that has `rows` rows and `tokens` tokens without.

    The drafted tokens that are most likely to survive are admitted, over all rows, as long as that gives the most
    committed tokens per second; then `further` more are. There are at most `budget`."""
    slots = _slots(proposals, budget)
    if not slots:
        return [0] * len(proposals)
    return _admit(proposals, slots[: _best_count(slots, cost.curve(rows, tokens, len(slots)), rows) + further])


def _slots(proposals: Sequence[Proposal], budget: int) -> list[float]:
    """Returns the survival of the drafted tokens that are most likely to survive, in falling order."""
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
    """Returns the lengths that admit so many slots. Of those as likely as the last, the first rows' are taken."""
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


class DraftPlanner:
    """Chooses draft lengths step by step, and now and then drafts further, so that the cost of such steps is measured.

    What that is expected to lose stays below a share of all time. Survival needs no exploration: it is learned from
    every proposal, drafted or not."""

    SHARE = 1 / 400
    FURTHER = (1, 2, 4, 8)  # slots beyond the best, in turn

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._saved = 0.0  # seconds that may be lost
        self._explored = 0

    def lengths(self, proposals: Sequence[Proposal], rows: int, tokens: int, budget: int) -> list[int]:
        """Returns how many tokens to draft of each proposal in the next step."""
        slots = _slots(proposals, budget)
        if not slots:
            return [0] * len(proposals)
        seconds = self.cost.curve(rows, tokens, len(slots))
        best = _best_count(slots, seconds, rows)
        return _admit(proposals, slots[: best + self._further(seconds[best : len(slots) + 1])])

    def _further(self, seconds: Sequence[float]) -> int:
        """Returns how many slots to draft beyond the best, given the seconds of steps with 0, 1, ... of them."""
        further = min(self.FURTHER[self._explored % len(self.FURTHER)], len(seconds) - 1)
        lost = seconds[further] - seconds[0]
        self._saved = min(self._saved + self.SHARE * seconds[0], seconds[-1])
        if not further or self._saved < lost:
            return 0
        self._saved -= lost
        self._explored += 1
        return further
