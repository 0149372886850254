"""Finds what would continue a repetition: the DRY penalty ("don't repeat yourself") as llama.cpp defines it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.types import DryPenalty

MAX_FLOAT = float(np.finfo(np.float32).max)
GROWTH = 1024  # positions that the arrays have room for beyond the known ones


class DryHistory:
    """Follows one sequence, token by token. For each earlier position it keeps how many tokens that end there equal the
    sequence's last tokens; a token that followed such a match would continue the repetition. A step takes time linear
    in the window, a prompt time linear in its length."""

    def __init__(self, dry: DryPenalty, breakers: tuple[tuple[int, ...], ...]) -> None:
        self._dry = dry
        self._single = frozenset(breaker[0] for breaker in breakers if len(breaker) == 1)
        self._ending: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # longer breakers by their last token
        for breaker in breakers:
            if len(breaker) > 1:
                self._ending[breaker[-1]].append(breaker)
        self._tokens = np.zeros(0, np.int32)
        self._matches = np.zeros(0, np.int32)  # [position] tokens that end there and equal the last ones
        self._known = 0
        self._breaker = -1, -1  # where the breaker that begins last begins and ends
        self._most = int(math.log(MAX_FLOAT) / math.log(dry.base)) if dry.base > 1.000001 else 0  # exponent; 0: any

    def penalties(self, tokens: Sequence[int], end: int) -> dict[int, float]:
        self._follow(tokens, end)
        dry = self._dry
        first = max(end - dry.window, 0) if dry.window >= 0 else 0
        limit = end - first if self._breaker[0] < first else end - 1 - self._breaker[1]
        if end - first <= dry.allowed_length or limit < dry.allowed_length:
            return {}
        lengths = np.minimum(self._matches[first : end - 1], np.arange(1, end - first))
        lengths = np.minimum(lengths, limit)
        found = np.flatnonzero(lengths >= dry.allowed_length)
        found = found[np.argsort(lengths[found], kind="stable")]
        longest = dict(zip(self._tokens[found + first + 1].tolist(), lengths[found].tolist(), strict=True))
        return {token: self._penalty(length) for token, length in longest.items() if token not in self._single}

    def _penalty(self, length: int) -> float:
        exponent = length - self._dry.allowed_length
        if self._most:
            exponent = min(exponent, self._most)
        return min(self._dry.multiplier * self._dry.base**exponent, MAX_FLOAT)

    def _follow(self, tokens: Sequence[int], end: int) -> None:
        if end > len(self._tokens):
            grown = np.zeros((2, end + max(GROWTH, end // 2)), np.int32)
            grown[:, : self._known] = self._tokens[: self._known], self._matches[: self._known]
            self._tokens, self._matches = grown
        new = end - self._known
        if new <= 0:
            return
        for at in range(self._known, end):
            self._watch_breakers(tokens, at)
        self._tokens[self._known : end] = tokens[self._known : end]
        if new > 1:
            self._matches[:end] = suffix_matches(tokens[:end])
        else:
            self._extend(end)
        self._known = end

    def _extend(self, end: int) -> None:
        """Takes over one more token: matches that it continues get longer, all others end."""
        same = self._tokens[: end - 1] == self._tokens[end - 1]
        before = np.zeros(end, np.int32)
        before[1:] = self._matches[: end - 1]
        self._matches[: end - 1] = np.where(same, before[:-1] + 1, 0)

    def _watch_breakers(self, tokens: Sequence[int], at: int) -> None:
        """Remembers a breaker that ends at `at`, unless one that begins later is known."""
        if tokens[at] in self._single:
            self._breaker = max(self._breaker, (at, at))
        for breaker in self._ending.get(tokens[at], ()):
            begin = at + 1 - len(breaker)
            if begin >= 0 and tuple(tokens[begin : at + 1]) == breaker:
                self._breaker = max(self._breaker, (begin, at))


def suffix_matches(tokens: Sequence[int]) -> NDArray[np.int32]:
    """Returns for each position how many tokens that end there equal the last tokens of the list: the Z-algorithm over
    the reversed list, in linear time. The last position itself has 0."""
    turned = tokens[::-1]
    count = len(turned)
    found = [0] * count
    left = right = 0  # turned[left:right] equals the beginning and reaches furthest
    for at in range(1, count):
        length = min(right - at, found[at - left]) if at < right else 0
        while at + length < count and turned[length] == turned[at + length]:
            length += 1
        found[at] = length
        if at + length > right:
            left, right = at, at + length
    return np.array(found[::-1], np.int32)
