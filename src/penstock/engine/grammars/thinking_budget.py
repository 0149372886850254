"""Follows an answer through the thinking that may come before it, and ends that when its budget is spent."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from penstock.types import Thinking


class ThinkingBudget:
    """Knows whether an answer is thinking: `active` while it is, and `opens` is the token that may begin the thinking
    next, or -1. The thinking is over when neither is set."""

    __slots__ = ("_budget", "_closes", "_tail", "active", "opens")

    def __init__(self, thinking: Thinking | None) -> None:
        self._closes: tuple[int, ...] = thinking.closes if thinking else ()
        self._budget = thinking.budget if thinking else None
        self._tail: tuple[int, ...] = ()
        self.opens = thinking.opens if thinking else -1
        self.active = thinking is not None and self.opens < 0

    def take(self, token: int, *, last: bool = True) -> tuple[int, ...] | None:
        """Advances by a token. Returns the tokens that must follow, none while budget is left; None for a token outside
        the thinking. A budget that is spent before the `last` of several tokens ends there."""
        if not self.active:
            begins, self.opens = token == self.opens, -1
            self.active = begins
            return () if begins else None
        self._tail = (*self._tail, token)[-len(self._closes) :]
        self.active = self._tail != self._closes
        if self._budget is None or not self.active:
            return ()
        self._budget -= 1
        return self._cut_off() if last and self.spent else ()

    def free_run(self, tokens: Sequence[int]) -> int:
        ahead = copy(self)
        for count, token in enumerate(tokens):
            ahead.take(token, last=False)
            if not ahead.active or ahead.spent:
                return count
        return len(tokens)

    @property
    def spent(self) -> bool:
        return self._budget is not None and self._budget <= 0

    def _cut_off(self) -> tuple[int, ...]:
        """Ends the thinking. Returns the end marker without the part of it that was sampled already."""
        self.active = False
        closes = self._closes
        begun = next(n for n in range(len(closes) - 1, -1, -1) if self._tail[len(self._tail) - n :] == closes[:n])
        return closes[begun:]
