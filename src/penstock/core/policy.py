"""Decides who goes first, who gives way, how many tokens a step may have and who may start.

A policy is pure: it has no clock, time comes in as an argument. Fairness, deadlines and service classes belong here and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence as Line
from typing import Any, NamedTuple, Protocol

from penstock.core.sequence import Sequence
from penstock.types import Limits, prefill_budget


class ServingLoad(NamedTuple):
    """Counts who is being served when a waiting sequence asks to start."""

    running: int
    background: int  # of those running: requests that may wait
    foreground: int  # requests that may not, running and waiting


class Room(NamedTuple):
    """Counts the blocks that a waiting sequence would find."""

    available: int
    needed: int  # for the tokens that the sequence already has
    reserved: int  # still to be taken for the tokens that running sequences already have
    running: int
    groups: int  # blocks that a sequence takes when it grows: one for each layer group


class Policy(Protocol):
    """Is asked by the scheduler whenever there is a choice."""

    dynamic: bool  # the order of sequences may change while they wait or run: it is asked for before every plan

    def order(self, seq: Sequence, now: float) -> Any:
        """Returns what sequences are sorted by: they run, wait and keep their memory in this order."""

    def victim(self, running: Line[Sequence], first: int, now: float) -> Sequence:
        """Returns which of running[first:] loses its blocks, so that one before them can go on."""

    def step_tokens(self, running: int, answering: int) -> int:
        """Returns how many tokens a step may have beside `answering` of `running` rows that decode."""

    def share(self, wanted: int, budget: int, behind: int) -> int:
        """Returns how many of the `budget` tokens left in a step a row gets that could use `wanted`, with so many
        running rows `behind` it."""

    def may_start(self, seq: Sequence, budget: int, load: ServingLoad, now: float) -> bool:
        """Returns whether a waiting sequence may start in a step with `budget` tokens left. If not, those after it
        wait too."""

    def fits(self, room: Room) -> bool:
        """Returns whether there are enough blocks for a waiting sequence to start."""


class StandardPolicy:
    """Serves by priority, then first come, first served, and keeps requests that may wait in the background."""

    dynamic = False

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._background_rows = max(1, limits.max_rows // 2)
        self._few = max(1, self._background_rows // 4)

    def order(self, seq: Sequence, now: float) -> tuple[bool, int, int]:
        """Returns background requests after all others; within each class the lower priority number goes first, and
        equals go in order of arrival."""
        return (seq.background, seq.priority, seq.arrival)

    def victim(self, running: Line[Sequence], first: int, now: float) -> Sequence:
        """Returns the last in line."""
        return running[-1]

    def step_tokens(self, running: int, answering: int) -> int:
        """Returns fewer tokens while rows decode: every token of a prompt delays them. The more rows there are, the
        more one step yields and the longer it may take."""
        limits = self._limits
        if not answering or not limits.prefill_budget:
            return limits.step_tokens
        return min(max(prefill_budget(limits.prefill_budget, answering), running), limits.step_tokens)

    def share(self, wanted: int, budget: int, behind: int) -> int:
        """Returns all that is wanted but one token for every running row behind, so that nobody's stream stands
        still."""
        return min(wanted, budget - behind)

    def may_start(self, seq: Sequence, budget: int, load: ServingLoad, now: float) -> bool:
        """Returns False for an encoder's prompt that the step cannot hold whole, and for a background request while
        there are enough of those."""
        if seq.background and not self._background_may_start(load):
            return False
        return budget >= (seq.end if self._limits.encoder else 1)

    def fits(self, room: Room) -> bool:
        """Returns whether every running sequence still finds the blocks for what it already has to compute and can
        then grow once in each layer group."""
        growth = (room.running + 1) * room.groups
        return room.running == 0 or room.available >= room.needed + room.reserved + growth

    def _background_may_start(self, load: ServingLoad) -> bool:
        """Returns whether one more background request may run: they have at most half of the rows. While foreground
        requests are served, those that end are not followed by others until a quarter of that is left."""
        if load.background >= self._background_rows:
            return False
        return load.background < self._few or not load.foreground
