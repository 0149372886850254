"""Defines what a request may claim of the engine. It imports the standard library only."""

from __future__ import annotations

from typing import NamedTuple


class Claim(NamedTuple):
    """Says whose share of the engine a request uses, and how soon it is to be answered. Times are in seconds."""

    tenant: str = ""  # whose share it is; all who are not known are one tenant
    weight: float = 1.0  # of the tenant: one with weight 3 gets three times the work of one with weight 1
    deadline: float | None = None  # from its arrival: if it has not begun by then, it fails
    ttft: float | None = None  # target, from its arrival to the first token of the answer
    itl: float | None = None  # target, from one token of the answer to the next

    def after(self, seconds: float) -> Claim:
        """Returns what is left of the claim when so many seconds have passed."""
        deadline, ttft = (None if time is None else max(time - seconds, 0.0) for time in (self.deadline, self.ttft))
        return self._replace(deadline=deadline, ttft=ttft)


NO_CLAIM = Claim()
