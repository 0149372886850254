"""Learns how long answers get, and how likely an answer continues after the tokens that it has.

The model is a piecewise constant hazard: each range of lengths counts the answers that ended and the tokens that were
generated there. An answer that reached its `max_tokens` was cut off: its tokens count, its end does not. So answers
with different limits teach one curve, and the limit of a new answer cuts that curve off. Every answer that ends lowers
the weight of all before it.

Everything here is pure: it reads no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Line
from itertools import pairwise
from math import exp

from penstock.core.sequence import Sequence

BOUNDS = sorted({round(2 ** (half / 2)) for half in range(2, 48)} | {0})  # two ranges for each doubling
WIDTHS = [end - start for start, end in pairwise(BOUNDS)]
KEEP = 0.995  # decay with each answer: the last few hundred count
FEW_TOKENS = 512  # who allows no more than these mostly gets them all
ASSUMED_MEAN = 512.0  # tokens of an answer while nothing is known; in public traces of conversations it is 210 to 370
ASSUMED_FULL = 2048.0  # the same of those that may have few
ASSUMED_WEIGHT = 1.0  # answers in each range that this assumption counts for
ENOUGH = 16  # answers of a tenant before its own curve is used
MOST_KINDS = 512  # whose curves are remembered

Kind = tuple[str, int]  # a tenant, or "" for all of them, and the size of `max_tokens`


class LengthCurve:
    """Knows how likely answers of one kind end at each length. They are assumed to have `assumed_mean` tokens until
    more is known."""

    __slots__ = ("_assumed_mean", "_ends", "_hazard", "_tokens", "seen")

    def __init__(self, assumed_mean: float) -> None:
        self.seen = 0  # answers that have ended
        self._assumed_mean = assumed_mean
        self._tokens = [0.0] * len(WIDTHS)  # decayed: generated in each range of lengths
        self._ends = [0.0] * len(WIDTHS)  # decayed: answers that ended there
        self._hazard: list[float] = []  # summed up to each bound; empty: to be summed again

    def observe(self, start: int, length: int) -> None:
        for at in range(_range_of(start + 1), _range_of(length) + 1):
            self._tokens[at] += max(min(length, BOUNDS[at + 1]) - max(start, BOUNDS[at]), 0)
        self._hazard = []

    def end(self, length: int, *, cut_off: bool) -> None:
        self._tokens = [KEEP * tokens for tokens in self._tokens]
        self._ends = [KEEP * ends for ends in self._ends]
        self._ends[_range_of(length)] += not cut_off
        self._hazard = []
        self.seen += 1

    def survival(self, length: int, more: Line[int]) -> list[float]:
        if not self._hazard:
            self._hazard = list(self._summed())
        reached = self._up_to(length)
        return [exp(reached - self._up_to(length + each)) for each in more]

    def _summed(self) -> Iterator[float]:
        total = 0.0
        yield total
        for tokens, ends, width in zip(self._tokens, self._ends, WIDTHS, strict=True):
            assumed = ASSUMED_WEIGHT * width
            total += width * (ends + assumed / self._assumed_mean) / (tokens + assumed)
            yield total

    def _up_to(self, length: int) -> float:
        at = _range_of(length)
        before, after = self._hazard[at], self._hazard[at + 1]
        return before + (after - before) * (length - BOUNDS[at]) / WIDTHS[at]


class AnswerLengths:
    """Learns a curve for each tenant and size of `max_tokens`, and one for each size of all tenants together, which is
    used until a tenant's own has seen enough."""

    def __init__(self) -> None:
        self._curves: OrderedDict[Kind, LengthCurve] = OrderedDict()  # the least recently used comes first
        self._learned: dict[int, int] = {}  # answer tokens learned from running sequences, by id

    def follow(self, seq: Sequence) -> None:
        """Learns from the tokens that a sequence has got since the last time. Those that still run must count too: of
        many that began together, the first to end are the shortest."""
        length = len(seq.tokens) - seq.prompt_len
        start = self._learned.get(seq.id, 0)
        self._learned[seq.id] = length
        for curve in self._of(seq):
            curve.observe(start, length)

    def end(self, seq: Sequence) -> None:
        length = len(seq.tokens) - seq.prompt_len
        if length:
            self.follow(seq)
            cut_off = len(seq.tokens) == seq.max_len and seq.tokens[-1] not in seq.params.stop_ids
            for curve in self._of(seq):
                curve.end(length, cut_off=cut_off)
        self._learned.pop(seq.id, None)

    def survival(self, seq: Sequence, more: Line[int]) -> list[float]:
        """Returns the probability that a sequence gets this many more tokens, for each of `more`: 0 beyond its
        limit."""
        own, every = self._of(seq)
        chances = (own if own.seen >= ENOUGH else every).survival(len(seq.tokens) - seq.prompt_len, more)
        left = seq.max_len - len(seq.tokens)
        return [chance if each <= left else 0.0 for chance, each in zip(chances, more, strict=True)]

    def _of(self, seq: Sequence) -> list[LengthCurve]:
        """Returns the curve of a sequence's own kind and the curve of all tenants. Sizes differ by factors of 4."""
        most = seq.max_len - seq.prompt_len
        size = max(most - 1, 0).bit_length() // 2
        found = []
        for kind in ((f"tenant {seq.params.claim.tenant}", size), ("", size)):
            curve = self._curves.pop(kind, None)
            found.append(curve or LengthCurve(ASSUMED_FULL if most <= FEW_TOKENS else ASSUMED_MEAN))
            self._curves[kind] = found[-1]
        while len(self._curves) > MOST_KINDS:
            self._curves.popitem(last=False)
        return found


def _range_of(length: int) -> int:
    return bisect_left(BOUNDS, length, lo=1, hi=len(WIDTHS)) - 1
