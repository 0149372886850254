"""Drafts how answers may go on, has steps verify the drafts, and learns from what became of them.

A drafted token is kept only if it is the token that is sampled in its place. What is sampled depends on nothing but the
context, the seed and the position, so an answer with drafts is the answer without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from penstock.core.drafts import DraftRoom
from penstock.core.sequence import Sequence as TokenSequence
from penstock.core.speculation import NOTHING, Proposal
from penstock.engine.draft_model import DraftModel, DraftTask, ModelDrafts
from penstock.engine.record import RequestRecord
from penstock.types import DraftCounts, Request, Row, RowResult, StepPlan, StepResult, Tokens, add_drafts

AHEAD = 8  # drafted tokens that are looked at to decide whether a row waits for them
SHARES = 4  # times its share of a step that a row may draft
MISSED = 1.0  # tokens that a row forgoes which waits for the step in flight


class Drafter(Protocol):
    """Drafts for one request."""

    def propose(self, most: int) -> Proposal:
        """Returns how its answer may go on, in at most `most` tokens."""

    def append(self, tokens: Sequence[int]) -> None:
        """Takes over tokens that were added to its answer."""


D = TypeVar("D", bound=Drafter)


class Drafters(Protocol[D]):
    """Drafts for all requests, and decides how much of it a step verifies: engine/drafting.py does."""

    def open(self, request: Request) -> D:
        """Begins to draft for a request."""

    def close(self, drafter: D) -> None:
        """Ends drafting for a request: others may learn from its answer."""

    def lengths(self, proposals: Sequence[Proposal], rows: int, tokens: int, budget: int) -> Sequence[int]:
        """Returns how many tokens of each proposal a step verifies that has so many rows and tokens without them: at
        most `budget` together."""

    def room(self, rows: int) -> int:
        """Returns how many tokens each of so many rows may draft in one step."""

    def seconds(self, rows: int, tokens: int, most: int) -> Sequence[float]:
        """Returns how long a step is expected to take that has so many rows and tokens without drafts, with 0, 1, ...
        drafted tokens, up to `most` at least."""

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Takes note of how long a step took that had nothing but answering rows."""

    def observe_gap(self, rows: int, seconds: float) -> None:
        """Takes note of how long a device waited for a step with drafts of so many rows."""

    def halves(self, rows: int) -> bool:
        """Returns whether a device waits longer for the drafts of so many rows than one more step takes."""

    def index(self) -> None:
        """Gets on with preparing drafts, for a small part of a step. Called once a step."""


class RequestDrafts:
    """Holds what is drafted for one request, by copying and, if there is a draft model, by that."""

    __slots__ = ("_tallies", "drafter", "model", "proposal")

    def __init__(self, drafter: Drafter, model: ModelDrafts | None) -> None:
        self.drafter = drafter
        self.model = model
        self.proposal = NOTHING  # that the step in flight verifies
        self._tallies: dict[str, list[int]] = {}  # by source: see DraftCounts

    @property
    def counts(self) -> list[DraftCounts]:
        """Returns what became of all that was drafted, by source."""
        return [DraftCounts(source, *tally) for source, tally in self._tallies.items()]

    def count(self, drafted: int, accepted: int) -> None:
        """Counts what became of the proposal that was verified."""
        tally = self._tallies.setdefault(self.proposal.source, [0, 0, 0])
        tally[0] += drafted
        tally[1] += accepted
        tally[2] += 1


class Speculation:
    """Proposes drafts to the scheduler, of at most `most` tokens, for those of the `records` that may have some. A
    draft model, if there is one, drafts where nothing better can be copied."""

    def __init__(
        self,
        drafting: Drafters[Any],
        records: Mapping[int, RequestRecord],
        most: int,
        model: DraftModel | None = None,
    ) -> None:
        self._drafting = drafting
        self._model = model
        self._records = records
        self._most = most
        self.counts: tuple[DraftCounts, ...] = ()  # of every source, for requests that have ended

    @property
    def copies(self) -> bool:
        """Returns whether all drafts are copied: a device has nothing to do until they are made."""
        return self._model is None

    def open(self, record: RequestRecord) -> None:
        """Begins to draft for a request that may have drafts. With mirostat none has: its next choice depends on the
        last one."""
        request = record.request
        if request.speculation != 0 and request.max_tokens > 1 and not request.pooling and not record.mirostat:
            model = None if self._model is None else self._model.open()
            record.drafts = RequestDrafts(self._drafting.open(request), model)

    def close(self, record: RequestRecord) -> None:
        """Ends drafting for a request."""
        if record.drafts is None:
            return
        self.counts = add_drafts((*self.counts, *record.drafts.counts))
        self._drafting.close(record.drafts.drafter)

    def propose(self, asked: Sequence[DraftRoom], rows: int, tokens: int, budget: int) -> list[tuple[int, ...]]:
        """Returns a draft for each of the sequences: see core/drafts.py."""
        records = [self._records[room.seq.id] for room in asked]
        reach = self._reach(rows)
        limits = [self._limit(record, min(room.most, reach)) for record, room in zip(records, asked, strict=True)]
        proposals = [self._propose(record, most) for record, most in zip(records, limits, strict=True)]
        if self._model is not None:
            tasks = [
                DraftTask(room, record, None if record.drafts is None else record.drafts.model, most)
                for room, record, most in zip(asked, records, limits, strict=True)
            ]
            seconds = partial(self._drafting.seconds, rows, tokens)
            proposals = self._model.propose(tasks, proposals, seconds, rows, budget)
        if not any(proposal.tokens for proposal in proposals):
            return [()] * len(asked)
        lengths = self._drafting.lengths(proposals, rows, tokens, budget)
        for record, proposal in zip(records, proposals, strict=True):
            if record.drafts is not None:
                record.drafts.proposal = proposal
        return [proposal.tokens[:length] for proposal, length in zip(proposals, lengths, strict=True)]

    def verify(self, plan: StepPlan, result: StepResult, seconds: float) -> StepResult:
        """Returns the result of a step, which took so many seconds, without what was sampled after wrong drafts."""
        drafted = sum(len(row.draft) for row in plan.rows)
        tokens = sum(row.count for row in plan.rows)
        if tokens - drafted == len(plan.rows):  # prompts cost more than their number of tokens tells
            self._drafting.observe(len(plan.rows), tokens, seconds)
        if not drafted:
            return result
        rows = [self._verify(row, answer) for row, answer in zip(plan.rows, result.rows, strict=True)]
        return StepResult(result.step, tuple(rows))

    def halves(self, rows: int) -> bool:
        """Returns whether so many rows with drafts are computed in two steps by turns."""
        return self._drafting.halves(rows)

    def observe_gap(self, rows: int, seconds: float) -> None:
        """Takes note of how long a device waited for a step with drafts."""
        self._drafting.observe_gap(rows, seconds)

    def prepare(self) -> None:
        """Gets on with preparing drafts. Called once a step, when it is launched: a device computes meanwhile."""
        self._drafting.index()

    def follow(self, event: Tokens, sequence: TokenSequence | None, rows: int) -> None:
        """Lets drafts follow what was answered. With steps in flight these come too late for the next row of the
        sequence, one of so many, unless it waits for them."""
        self.append(event.seq, event.tokens)
        if sequence is not None:
            sequence.awaits_drafts = self.is_worth_waiting(event.seq, rows)

    def append(self, id: int, tokens: Sequence[int]) -> None:
        """Takes over tokens that were added to a request's answer."""
        if (record := self._records.get(id)) is not None and record.drafts is not None:
            record.drafts.drafter.append(tokens)
            if record.drafts.model is not None:
                record.drafts.model.append(tokens)

    def is_worth_waiting(self, id: int, rows: int) -> bool:
        """Returns whether a request's drafts, in a step of so many rows, are likely to yield more than the step that it
        misses when its next row waits for them."""
        if (record := self._records.get(id)) is None:
            return False
        most = self._limit(record, min(self._drafting.room(rows), AHEAD))
        if most > MISSED:
            proposal = self._propose(record, self._limit(record, self._reach(rows)))  # what the next step may ask for
            if sum(proposal.survival[:most]) > MISSED:
                return True
        if self._model is None or record.drafts is None or record.drafts.model is None or most < 1:
            return False
        return self._model.is_worth_waiting(record.drafts.model, MISSED if rows > 1 else 0.0)

    def _reach(self, rows: int) -> int:
        """Returns how many tokens are proposed for one of so many rows, at most: more than its share of a step, since
        others may need less."""
        return max(SHARES * self._drafting.room(rows), AHEAD)

    def _limit(self, record: RequestRecord, most: int) -> int:
        """Returns how many tokens may be drafted for a request, in a row that has room for so many."""
        asked = record.request.speculation
        return min(most, self._most, self._most if asked is None else asked)

    def _propose(self, record: RequestRecord, most: int) -> Proposal:
        """Returns what is copied for a request."""
        if record.drafts is None:
            return NOTHING
        request, constraint = record.request, record.constraint
        proposal = record.drafts.drafter.propose(most)
        if not proposal.tokens:
            return NOTHING
        count = next((at for at, token in enumerate(proposal.tokens) if token in request.stop_ids), most)
        if constraint is not None:
            count = constraint.draftable(proposal.tokens[:count], force=request.sampling.logprobs is None)
        return proposal.first(count)

    def _verify(self, row: Row, answer: RowResult) -> RowResult:
        if not row.draft:
            return answer
        wrong = (at for at, token in enumerate(row.draft) if token != answer.tokens[at])
        accepted = next(wrong, len(row.draft))
        if (record := self._records.get(row.seq)) is not None and record.drafts is not None:
            record.drafts.count(len(row.draft), accepted)
        tokens, logprobs = answer.tokens[: accepted + 1], answer.logprobs[: accepted + 1]
        return answer._replace(tokens=tokens, logprobs=logprobs, accepted=accepted)
