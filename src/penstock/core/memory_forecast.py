"""Forecasts how many blocks running sequences will hold, so that none starts that would soon cost another its blocks.

Sequences grow and end at different times. Their total is forecast for several times from now, in steps: for each
sequence, the blocks of all layer groups at its length then, times the probability that it still runs. More of them may
continue than expected, so some standard deviations of that sum are kept free as well; the number is learned from the
cost of preemptions.

Everything here is pure: it reads no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

from penstock.core.lengths import AnswerLengths
from penstock.core.sequence import Sequence
from penstock.types import Limits

DEVIATIONS = 1.5  # standard deviations that are kept free at first
BOUNDS = (-1.0, 3.0)  # limits of these deviations
ACCEPTED = 0.02  # share of computed tokens that may be computed again: with none, memory would lie idle
FINER = 2**0.25  # times as far as one time of the forecast is the next


class Growth(NamedTuple):
    """Forecasts how many blocks more than now a sequence holds, at each time of the forecast."""

    capacity: int  # the sequence's capacity at that time
    expected: list[float]
    variance: list[float]


class MemoryForecast:
    """Forecasts the blocks of the sequences that run and of one that waits."""

    def __init__(self, limits: Limits, lengths: AnswerLengths) -> None:
        self.deviations = DEVIATIONS
        self._size = limits.block_size
        self._windows = limits.windows
        self._lengths = lengths
        times = [0]
        while times[-1] < limits.max_len:
            times.append(max(times[-1] + limits.block_size, int(FINER * times[-1])))
        self._periods = list(pairwise(times))
        self._starts = times[:-1]
        self._known: dict[int, Growth] = {}

    def peak(self, seq: Sequence, needed: int, running: Iterable[Sequence]) -> float:
        """Returns how many blocks more than now these sequences will likely hold at worst, if a waiting one starts that
        takes `needed` blocks for the tokens that it has."""
        known, self._known = self._known, {}
        for each in running:
            growth = known.get(each.id)
            if growth is None or growth.capacity != each.blocks.capacity:
                self._lengths.follow(each)
                shared = shared_blocks(each)
                growth = self._growth(each, shared, held_blocks(each) - shared)
            self._known[each.id] = growth
        growths = [*self._known.values(), self._growth(seq, max(self.blocks(seq.end) - needed, 0), 0)]
        expected = map(sum, zip(*(each.expected for each in growths), strict=True))
        variance = map(sum, zip(*(each.variance for each in growths), strict=True))
        return max(mean + self.deviations * sqrt(spread) for mean, spread in zip(expected, variance, strict=True))

    def end(self, seq: Sequence) -> None:
        """Learns how much to keep free from a sequence that has ended: more if many of its tokens were computed again,
        a little less if none were."""
        again = seq.times.recomputed / (len(seq.tokens) + seq.times.recomputed)
        self.deviations = min(max(self.deviations + again - ACCEPTED, BOUNDS[0]), BOUNDS[1])

    def blocks(self, positions: int) -> int:
        """Returns how many blocks of all layer groups a sequence of `positions` positions holds. Blocks behind a window
        are freed whenever another block is full."""
        full, size = positions // self._size * self._size, self._size
        hidden = sum(max(full - window + 1, 0) // size for window in self._windows if window)
        return len(self._windows) * -(-positions // size) - hidden

    def _growth(self, seq: Sequence, shared: int, own: int) -> Growth:
        """Returns the growth of a sequence that holds `own` private blocks and shares others. If it runs at the start
        of a period, it counts with its length at the end."""
        expected, variance = [], []
        chances = self._lengths.survival(seq, self._starts)
        for (_, end), chance in zip(self._periods, chances, strict=True):
            then = self.blocks(min(seq.end + end, seq.max_len)) - shared
            expected.append(chance * then - own)
            variance.append(chance * (1 - chance) * then * then)
        return Growth(seq.blocks.capacity, expected, variance)


def held_blocks(seq: Sequence) -> int:
    return sum(map(len, seq.blocks.tables)) - sum(seq.blocks.window_starts)


def shared_nodes(seq: Sequence) -> int:
    return bisect_left(seq.blocks.nodes, True, key=lambda node: node.holders == 1)


def shared_blocks(seq: Sequence) -> int:
    nodes = shared_nodes(seq)
    return sum(max(nodes - start, 0) for start in seq.blocks.window_starts)
