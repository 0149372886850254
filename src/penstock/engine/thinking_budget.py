"""Where an answer is in what it says to itself before it answers."""

from __future__ import annotations

from penstock.types import Thinking


class Thoughts:
    """`opens` is the token that may begin them next, or -1; they are over where neither that nor `going` is set."""

    __slots__ = ("_budget", "_closes", "_tail", "going", "opens")

    def __init__(self, thinking: Thinking | None) -> None:
        self._closes: tuple[int, ...] = thinking.closes if thinking else ()
        self._budget = thinking.budget if thinking else None
        self._tail: tuple[int, ...] = ()
        self.opens = thinking.opens if thinking else -1
        self.going = thinking is not None and self.opens < 0

    def take(self, token: int) -> tuple[int, ...] | None:
        """What must follow the token where the budget is spent; None for a token that is no part of them."""
        if not self.going:
            begins, self.opens = token == self.opens, -1
            self.going = begins
            return () if begins else None
        self._tail = (*self._tail, token)[-len(self._closes) :]
        self.going = self._tail != self._closes
        if self._budget is None or not self.going:
            return ()
        self._budget -= 1
        return self._cut_off() if self._budget <= 0 else ()

    def _cut_off(self) -> tuple[int, ...]:
        """The end marker, or what of it has not come by itself."""
        self.going = False
        closes = self._closes
        begun = next(n for n in range(len(closes) - 1, -1, -1) if self._tail[len(self._tail) - n :] == closes[:n])
        return closes[begun:]
