"""Drafts what a test already knows to be right, and now and then something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from penstock.core.drafting.lengths import Proposal
from penstock.engine.drafts.speculation import Drafter
from penstock.types import Request


class Guesses:
    """Drafts for one request how it will go on, further than the answer goes if that is known, and errs at random."""

    def __init__(self, right: Sequence[int], vocab: int, random: Random) -> None:
        self._right, self._vocab, self._random = list(right), vocab, random
        self._done = 0

    def propose(self, most: int) -> Proposal:
        right = self._right[self._done : self._done + most]
        tokens = tuple(token if self._random.random() < 0.8 else self._random.randrange(self._vocab) for token in right)
        return Proposal(tokens, (0.5,) * len(tokens), "context")

    def append(self, tokens: Sequence[int]) -> None:
        self._done += len(tokens)


class RandomDrafting:
    """Drafts random lengths of what Guesses propose. `right` returns how a request will go on."""

    def __init__(self, right: Callable[[Request], Sequence[int]], vocab: int, random: Random) -> None:
        self._right, self._vocab, self._random = right, vocab, random

    def open(self, request: Request) -> Guesses:
        return Guesses(self._right(request), self._vocab, self._random)

    def close(self, drafter: Drafter) -> None: ...

    def lengths(self, proposals: Sequence[Proposal], rows: int, tokens: int, budget: int) -> list[int]:
        chosen = []
        for proposal in proposals:
            chosen.append(self._random.randint(0, min(len(proposal.tokens), budget)))
            budget -= chosen[-1]
        return chosen

    def seconds(self, rows: int, tokens: int, most: int) -> list[float]:
        return [1.0] * (most + 1)

    def observe(self, rows: int, tokens: int, seconds: float) -> None: ...

    def observe_gap(self, rows: int, seconds: float) -> None: ...

    def halves(self, rows: int) -> bool:
        return self._random.random() < 0.5

    def room(self, rows: int) -> int:
        return 8

    def index(self) -> None: ...
