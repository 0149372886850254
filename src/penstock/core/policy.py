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


class StepBudget:
    """Is what a step may still compute."""

    __slots__ = ("tokens",)

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def share(self, wanted: int, behind: int = 0) -> int:
        """Returns how many tokens a row gets that could use `wanted`: all but one for every running row behind it, so
        that nobody's stream stands still."""
        return min(wanted, self.tokens - behind)

    def spend(self, count: int) -> None:
        """Takes off what a row computes."""
        self.tokens -= count


class Policy(Protocol):
    """Is asked by the scheduler whenever there is a choice."""

    def order(self, seq: Sequence) -> Any:
        """Returns what running sequences, and those in one tenant's line, are sorted by: they keep their memory in
        this order. It is always the same for a sequence."""

    def turn(self, seq: Sequence) -> Any:
        """Returns what sequences of different tenants are compared by: whose prompt is least is computed next."""

    def victim(self, behind: Line[Sequence]) -> Sequence:
        """Returns which of these loses its blocks, so that one before them can go on."""

    def displaced(self, seq: Sequence, running: Line[Sequence]) -> Sequence | None:
        """Returns who gives way to a waiting sequence that is next in turn and finds no room, if anyone does."""

    def budget(self, running: Line[Sequence]) -> StepBudget:
        """Returns what a step may compute while these are running."""

    def may_start(self, seq: Sequence, budget: StepBudget, load: ServingLoad) -> bool:
        """Returns whether a waiting sequence may start in a step that has so much left. If not, those after it wait
        too."""

    def fits(self, room: Room) -> bool:
        """Returns whether there are enough blocks for a waiting sequence to start."""


class StandardPolicy:
    """Serves by priority, then shares the work among tenants, then goes by deadlines and order of arrival. Requests
    that may wait are kept in the background."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._background_rows = max(1, limits.max_rows // 2)
        self._few = max(1, self._background_rows // 4)

    def order(self, seq: Sequence) -> Any:
        """Returns background requests after all others; within each class the lower priority number goes first, then
        the earlier deadline, and equals go in order of arrival."""
        return (seq.background, seq.priority, seq.due, seq.arrival)

    def turn(self, seq: Sequence) -> Any:
        """Returns the order within a line, but of equal priority the tenant that has had the least goes first. Of two
        that have had the same, it is the one that runs less."""
        tenant = seq.tenant
        return (seq.background, seq.priority, tenant.counter, tenant.running, seq.due, seq.arrival)

    def victim(self, behind: Line[Sequence]) -> Sequence:
        """Returns the one of the tenant most over its share, of these the one that has least to compute again."""
        return max(behind, key=_give_way)

    def displaced(self, seq: Sequence, running: Line[Sequence]) -> Sequence | None:
        """Returns one of a tenant that has had more and has several running, if the tenant of `seq` has none running.
        So a tenant's first request does not wait for another tenant's answers to end."""
        if seq.tenant.running:
            return None
        others = [
            each
            for each in running
            if each.tenant.running > 1
            and each.tenant.counter >= seq.tenant.counter
            and (each.background, each.priority) >= (seq.background, seq.priority)
        ]
        return self.victim(others) if others else None

    def budget(self, running: Line[Sequence]) -> StepBudget:
        """Returns fewer tokens while rows decode: every token of a prompt delays them. The more rows there are, the
        more one step yields and the longer it may take."""
        limits = self._limits
        answering = sum(seq.end > seq.prompt_len for seq in running)
        if not answering or not limits.prefill_budget:
            return StepBudget(limits.step_tokens)
        return StepBudget(min(max(prefill_budget(limits.prefill_budget, answering), len(running)), limits.step_tokens))

    def may_start(self, seq: Sequence, budget: StepBudget, load: ServingLoad) -> bool:
        """Returns False for an encoder's prompt that the step cannot hold whole, and for a background request while
        there are enough of those."""
        if seq.background and not self._background_may_start(load):
            return False
        return budget.tokens >= (seq.end if self._limits.encoder else 1)

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


def _give_way(seq: Sequence) -> Any:
    """Returns what decides who loses its blocks: the greatest does."""
    return (seq.background, seq.priority, seq.tenant.counter, -seq.computed, seq.arrival)
