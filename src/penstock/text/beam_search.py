"""Implements beam search as vLLM defines it.

The search is independent of engines: its driver asks a model for the likeliest next tokens of each running beam, passes
them to `advance`, and repeats until the search is done.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from penstock.errors import InvalidRequest
from penstock.types import TokenLogprob

MAX_WIDTH = 10  # beams; an engine returns up to 20 alternatives, two per beam
MAX_PENALTY = 16.0  # far above any useful value; larger exponents overflow


class Beam(NamedTuple):
    """Holds one candidate answer."""

    tokens: tuple[int, ...] = ()  # without the token that ended it
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token
    total: float = 0.0  # logprob of all tokens, including the one that ended it
    finish: str | None = None  # "stop" or "length"; None while running
    stop_token: int | None = None  # the token that ended it


class BeamSearch:
    """Keeps the `width` likeliest beams. A beam's score is its total logprob divided by its length, including the
    prompt, to the power of `length_penalty`. The search ends after `max_tokens` tokens, or when no running beam can
    still become one of the best.
    """

    def __init__(
        self, prompt_len: int, width: int, max_tokens: int, ends: Collection[int], length_penalty: float = 1.0
    ) -> None:
        if not 1 <= width <= MAX_WIDTH:
            raise InvalidRequest(f"the beam width must be between 1 and {MAX_WIDTH}; got {width}", param="n")
        if not -MAX_PENALTY <= length_penalty <= MAX_PENALTY:
            raise InvalidRequest(
                f"length_penalty must be between {-MAX_PENALTY:g} and {MAX_PENALTY:g}; got {length_penalty}",
                param="length_penalty",
            )
        self.running = [Beam()]
        self.alternatives = 2 * width  # required next tokens per beam: half of them may end their beam
        self._prompt_len = prompt_len
        self._width = width
        self._max_tokens = max_tokens
        self._ends = frozenset(ends)
        self._penalty = length_penalty
        self._finished: list[Beam] = []
        self._length = 0  # tokens of each running beam

    @property
    def done(self) -> bool:
        return not self.running

    def advance(self, scored: Sequence[TokenLogprob]) -> None:
        """Extends each running beam by one token. `scored` has each beam's likeliest next tokens (its `top`)."""
        extended = []
        for beam, next in zip(self.running, scored, strict=True):
            for token, logprob in next.top[: self.alternatives]:
                total = beam.total + logprob
                if token in self._ends:
                    self._finished.append(beam._replace(total=total, finish="stop", stop_token=token))
                else:
                    entry = TokenLogprob(token, logprob, next.top)
                    extended.append(Beam((*beam.tokens, token), (*beam.logprobs, entry), total))
        self._length += 1
        self.running = sorted(extended, key=self.score, reverse=True)[: self._width]
        if self._length >= self._max_tokens:
            self._finished += [beam._replace(finish="length") for beam in self.running]
            self.running = []
        elif self._settled():
            self.running = []

    def best(self, count: int) -> list[Beam]:
        return sorted(self._finished, key=self.score, reverse=True)[:count]

    def score(self, beam: Beam) -> float:
        return beam.total / self._weight(len(beam.tokens))

    def _weight(self, length: int) -> float:
        return float((self._prompt_len + length) ** self._penalty)

    def _settled(self) -> bool:
        """Returns True if no running beam can overtake the finished ones. Totals only fall, so a beam's best possible
        score has its current total and the most favourable length.
        """
        best = self.best(self._width)
        if len(best) < self._width:
            return False
        weight = max(self._weight(self._length), self._weight(self._max_tokens))
        reachable = max((beam.total for beam in self.running), default=float("-inf")) / weight
        return self.score(best[-1]) >= reachable
