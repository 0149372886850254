"""Decides who goes first, who gives way, how many tokens a step may have and who may start.

A policy is pure: time comes in as an argument. Fairness, deadlines and service classes belong here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Line
from math import inf
from typing import Any, NamedTuple, Protocol

from penstock.core.lengths import AnswerLengths
from penstock.core.memory_forecast import MemoryForecast, held_blocks, shared_blocks, shared_nodes
from penstock.core.sequence import Sequence
from penstock.core.step_cost import CostModel, PromptCost
from penstock.core.tiers import CopyCosts
from penstock.types import PROMPT_PATIENCE, Limits, Row, prefill_budget

OVERCOMMIT = 0.5  # share of host memory's blocks that sequences may need beyond the device's: copies cost little
CAUTIOUS = 32  # tokens of prompts in a step with a target before the cost of steps is known
LEAST = 8  # tokens of the first prompt in a step at any cost, so that a wrong cost is corrected
FEW_STEPS = 16  # most steps of a long prompt while answers without a target run
ROUND = 128  # tokens of which such a step has a multiple, because devices pad it to one


class ServingLoad(NamedTuple):
    """Counts who is being served when a waiting sequence asks to start."""

    running: int
    background: int  # running requests that may wait
    foreground: int  # requests that may not, running and waiting


class Room(NamedTuple):
    """Counts the blocks that a waiting sequence would find."""

    available: int
    needed: int  # blocks of the sequence's known tokens
    reserved: int  # still to be taken for the tokens that running sequences already have
    groups: int  # blocks that a sequence takes when it grows: one for each layer group
    reach: int = 0  # positions that running sequences have at most in the end, all together


class StepBudget:
    """Counts the rest of a step's budget: tokens and, if its time has a target, seconds of prompts by their learned
    cost."""

    __slots__ = ("_cost", "_least", "_seconds", "hurried", "reserved", "tokens")

    def __init__(self, tokens: int, seconds: float = 0.0, cost: PromptCost | None = None) -> None:
        self.tokens = tokens
        self.hurried = False  # it has a tenant's first prompt: others can wait a step
        self.reserved = 0  # blocks: see Room
        self._seconds = seconds
        self._cost = cost
        self._least = LEAST if seconds > 0 else 1  # tokens that the next prompt gets

    def share(self, wanted: int, behind: int = 0) -> int:
        """Returns how many tokens an answer's row gets that could use `wanted`: all but one for every running row
        behind it, so that nobody's stream stands still."""
        return min(wanted, self.tokens - behind)

    def prompt_share(self, wanted: int, context: int) -> int:
        """Returns how many tokens a prompt gets that could use `wanted` after `context` others: one at least, and of
        the first prompt some more."""
        most = min(wanted, self.tokens)
        if self._cost is not None:
            most = min(most, max(self._cost.tokens_within(self._seconds, context), self._least))
        return most

    def spend(self, count: int) -> None:
        self.tokens -= count

    def spend_on_prompt(self, row: Row) -> None:
        """Subtracts a prompt's row. When the time is used up, no tokens are left."""
        self.tokens -= row.count
        self._least = 1
        if self._cost is not None:
            self._seconds -= self._cost.seconds(row.count, row.count * (row.start + row.count / 2))
            if self._seconds <= 0 or not self._cost.tokens_within(self._seconds, 0):
                self.tokens = 0


class Policy(Protocol):
    """Is asked by the scheduler whenever there is a choice."""

    def rank(self, seq: Sequence, computed: int) -> float:
        """Returns the rank of an arriving sequence with `computed` cached prompt tokens. The least rank goes first
        where nothing else decides."""

    def order(self, seq: Sequence) -> Any:
        """Returns the sort key of running sequences, and of waiting ones in one tenant's line: they keep their memory
        in this order. The key of a sequence never changes."""

    def turn(self, seq: Sequence) -> Any:
        """Returns the key that compares sequences of different tenants: the least is computed next."""

    def victim(self, behind: Line[Sequence], places: int = 0) -> Sequence:
        """Returns the sequence that loses its blocks to one before it. Host memory has `places` for blocks."""

    def displaced(self, seq: Sequence, running: Line[Sequence], places: int = 0) -> Sequence | None: ...

    def held_back(self, ahead: Sequence | None, running: Line[Sequence]) -> Collection[int]:
        """Returns the ids of running sequences that have no row in the next step, so that the prompt of a waiting one
        that is next in turn is computed sooner, if there is one."""

    def budget(self, running: Line[Sequence], heads: Line[Sequence]) -> StepBudget: ...

    def may_start(self, seq: Sequence, budget: StepBudget, load: ServingLoad) -> bool:
        """Returns whether a waiting sequence may start in a step with this budget left. If not, later ones wait too."""

    def fits(self, seq: Sequence, room: Room, running: Line[Sequence]) -> bool: ...

    def ended(self, seq: Sequence) -> None: ...


class StandardPolicy:
    """Serves by priority, then shares the work among tenants, then goes by deadlines and order of arrival. Requests
    that may wait are kept in the background."""

    def __init__(self, limits: Limits, costs: CostModel | None = None, copies: CopyCosts | None = None) -> None:
        self._limits = limits
        self._costs = costs
        self._copies = copies
        self._lengths = AnswerLengths()
        self._memory = MemoryForecast(limits, self._lengths)
        self._overcommit = OVERCOMMIT * limits.host_places  # blocks
        self._background_rows = max(1, limits.max_rows // 2)
        self._few = max(1, self._background_rows // 4)
        self._held = False  # somebody was, in the last step

    def rank(self, seq: Sequence, computed: int) -> float:
        """Returns when a sequence has come, and some times later as long as the rest of its prompt takes. So a short
        prompt goes before a long one that came not much earlier, and no prompt waits for ever. Before the cost of steps
        is known, prompts go in order of arrival."""
        if self._costs is None or not self._costs.known:
            return seq.times.arrived
        return seq.times.arrived + PROMPT_PATIENCE * self._costs.prompt_seconds(seq.end - computed, computed)

    def order(self, seq: Sequence) -> Any:
        """Returns background requests after all others; within each class the lower priority number goes first, then
        the earlier deadline, then the lower rank, and equals go in order of arrival."""
        return (seq.params.background, seq.params.priority, seq.standing.due, seq.standing.rank, seq.standing.arrival)

    def turn(self, seq: Sequence) -> Any:
        """Returns the order within a line, but of equal priority the tenant that has had the least goes first. Of two
        that have had the same, it is the one that runs less. Of a prompt that is begun, only the rest counts."""
        tenant = seq.standing.tenant
        rank = seq.standing.rank if seq.waits else self.rank(seq, seq.planned)
        return (
            seq.params.background,
            seq.params.priority,
            tenant.counter,
            tenant.running,
            seq.standing.due,
            rank,
            seq.standing.arrival,
        )

    def victim(self, behind: Line[Sequence], places: int = 0) -> Sequence:
        """Returns one of the tenant most over its share: that which wastes least for each block that it frees, then
        that which wastes least in all, then the one that came last."""

        def give_way(seq: Sequence) -> Any:
            each, all = self._waste(seq, places)
            return (
                seq.params.background,
                seq.params.priority,
                seq.standing.tenant.counter,
                -each,
                -all,
                seq.standing.arrival,
            )

        return max(behind, key=give_way)

    def displaced(self, seq: Sequence, running: Line[Sequence], places: int = 0) -> Sequence | None:
        """Returns one of a tenant that has had more and has several running, if the tenant of `seq` has none running.
        So a tenant's first request does not wait for another tenant's answers to end."""
        others = _of_busier_tenants(seq, running)
        return self.victim(others, places) if others else None

    def _waste(self, seq: Sequence, places: int) -> tuple[float, float]:
        """Returns the waste of preempting a running sequence, per freed block and in total: seconds or, before the cost
        of prompts is known, tokens to compute again. Shared blocks are neither lost nor freed. Full blocks that fit in
        host memory only cost their copies."""
        size, costs = self._limits.block_size, self._costs
        kept, freed = shared_nodes(seq) * size, held_blocks(seq) - shared_blocks(seq)
        waste: float = seq.computed - kept
        if costs is not None and costs.known:
            waste = costs.prompts.seconds_after(kept, seq.computed)
            if self._copies is not None and freed <= places:
                copied = self._copies.seconds("out", freed) + self._copies.seconds("in", freed)
                waste = min(waste, copied + costs.prompts.seconds_after(len(seq.blocks.nodes) * size, seq.computed))
        return waste / freed if freed else inf, waste

    def held_back(self, ahead: Sequence | None, running: Line[Sequence]) -> Collection[int]:
        """Returns sequences of tenants with more work and several running, if the tenant of `ahead` has none running
        and its prompt takes no longer than their answers. So a tenant's first token does not wait for a step of other
        answers. No sequence is held back twice in a row, or if its target is tighter than the usual one."""
        held: set[int] = set()
        if ahead is not None and not self._held and self._costs is not None and self._costs.known:
            usual = self._costs.usual_target(len(running))
            others = [seq for seq in _of_busier_tenants(ahead, running) if (seq.params.claim.itl or usual) >= usual]
            answers = self._costs.answer_seconds(len(others), len(others))
            if self._costs.prompt_seconds(ahead.end) <= answers:
                held = {seq.id for seq in others}
        self._held = bool(held)
        return held

    def budget(self, running: Line[Sequence], heads: Line[Sequence]) -> StepBudget:
        """Returns fewer tokens while rows decode: every token of a prompt delays them. The tightest ITL target of these
        rows decides, by the cost of steps. Rows without a target have the usual one, unless they are in the background
        or the prefill budget is a whole step; the prefill budget bounds their delay too, so a fast device stays well
        below the target."""
        limits, costs = self._limits, self._costs
        answering = [seq for seq in running if seq.end > seq.prompt_len]
        if not answering:
            return StepBudget(limits.step_tokens)
        rows = len(answering)
        stated = min([seq.params.claim.itl for seq in answering if seq.params.claim.itl is not None], default=inf)
        if costs is None or not costs.known:
            cautious = costs is not None and stated < inf
            tokens = len(running) + CAUTIOUS if cautious else self._few_tokens(running, rows)
            return StepBudget(min(tokens, limits.step_tokens))
        bounded = 0 < limits.prefill_budget < limits.step_tokens
        silent = bounded and any(seq.params.claim.itl is None and not seq.params.background for seq in answering)
        target = min(stated, costs.usual_target(rows) if silent else inf)
        tokens = limits.step_tokens if stated == target < inf else self._tokens(running, heads, rows)
        if target == inf:
            return StepBudget(tokens)
        return StepBudget(tokens, costs.left_for_prompts(target, rows), costs.prompts)

    def _few_tokens(self, running: Line[Sequence], answering: int) -> int:
        limits = self._limits
        if not limits.prefill_budget:
            return limits.step_tokens
        return min(max(prefill_budget(limits.prefill_budget, answering), len(running)), limits.step_tokens)

    def _tokens(self, running: Line[Sequence], heads: Line[Sequence], answering: int) -> int:
        """Returns the tokens of a step by the prefill budget, or more if a long prompt would take too many steps."""
        budget = self._few_tokens(running, answering)
        begun = [seq for seq in running if seq.planned < seq.prompt_len]
        longest = max([seq.prompt_len for seq in (*begun, *heads)], default=0)
        if longest > FEW_STEPS * budget:
            budget = -(-(longest // FEW_STEPS + answering) // ROUND) * ROUND
        return min(budget, self._limits.step_tokens)

    def may_start(self, seq: Sequence, budget: StepBudget, load: ServingLoad) -> bool:
        """Returns False for an encoder's prompt that the step cannot hold whole, for a background request while there
        are enough of those, and for a tenant that runs some in a step with another's first."""
        if budget.hurried and seq.standing.tenant.running:
            return False
        if seq.params.background and not self._background_may_start(load):
            return False
        return budget.tokens >= (seq.end if self._limits.encoder else 1)

    def fits(self, seq: Sequence, room: Room, running: Line[Sequence]) -> bool:
        """Returns whether every running sequence still finds blocks for its known tokens, can then grow once in each
        layer group, and will likely find blocks for its answer, or places in host memory. A tenant's first request does
        not wait for the last condition if another would have to give way to it."""
        if not running:
            return True
        if room.available < room.needed + room.reserved + (len(running) + 1) * room.groups:
            return False
        most = (room.reach + seq.max_len) // self._limits.block_size + len(running) + 1
        if room.reach and most * room.groups <= self._limits.num_blocks:
            return True  # at any length of the answers
        first = self.displaced(seq, running) is not None
        return first or self._memory.peak(seq, room.needed, running) <= room.available + self._overcommit

    def ended(self, seq: Sequence) -> None:
        self._lengths.end(seq)
        self._memory.end(seq)

    def _background_may_start(self, load: ServingLoad) -> bool:
        """Returns whether one more background request may run: they have at most half of the rows. While foreground
        requests are served, those that end are not followed by others until a quarter of that is left."""
        if load.background >= self._background_rows:
            return False
        return load.background < self._few or not load.foreground


def _of_busier_tenants(seq: Sequence, running: Line[Sequence]) -> list[Sequence]:
    """Returns the running sequences of tenants that have had more and have several running, if the tenant of `seq` has
    none running."""
    if seq.standing.tenant.running:
        return []
    return [
        each
        for each in running
        if each.standing.tenant.running > 1
        and each.standing.tenant.counter >= seq.standing.tenant.counter
        and (each.params.background, each.params.priority) >= (seq.params.background, seq.params.priority)
    ]
