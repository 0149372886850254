"""Drafts continuations of answers, verifies them in steps, and learns from the results.

A drafted token is kept only if it equals the token that is sampled in its position. Sampling depends only on the
context, the seed and the position, so answers with and without drafts are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from penstock.core.drafting.lengths import NOTHING, Proposal
from penstock.core.drafting.rows import DraftRoom
from penstock.engine.drafts.draft_model import DraftModel, DraftTask, ModelDrafts
from penstock.engine.feature import End, Feature
from penstock.engine.request_record import RequestRecord
from penstock.types import DraftCounts, Request, Row, RowResult, StepPlan, StepResult, Tokens, add_drafts

AHEAD = 8  # drafted tokens that are looked at to decide whether a row waits for them
SHARES = 4  # times its share of a step that a row may draft
MISSED = 1.0  # tokens that a row forgoes which waits for the step in flight


class Drafter(Protocol):
    """Drafts for one request."""

    def propose(self, most: int) -> Proposal: ...

    def append(self, tokens: Sequence[int]) -> None: ...


D = TypeVar("D", bound=Drafter)


class Drafters(Protocol[D]):
    """Drafts for all requests, and decides how much of it a step verifies: engine/drafts/drafting.py does."""

    def open(self, request: Request) -> D: ...

    def close(self, drafter: D) -> None: ...

    def lengths(self, proposals: Sequence[Proposal], rows: int, tokens: int, budget: int) -> Sequence[int]:
        """Returns how many tokens of each proposal a step verifies, at most `budget` in total. `rows` and `tokens`
        count the step without drafts."""

    def room(self, rows: int) -> int:
        """Returns how many tokens each of `rows` rows may draft in one step."""

    def seconds(self, rows: int, tokens: int, most: int) -> Sequence[float]:
        """Returns the expected seconds of a step with these rows and tokens and 0, 1, ... drafted tokens, at least up
        to `most`."""

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Learns how long a decode-only step took."""

    def observe_gap(self, rows: int, seconds: float) -> None:
        """Learns how long a device waited for a step with drafts of `rows` rows."""

    def halves(self, rows: int) -> bool:
        """Returns whether a device waits longer for the drafts of `rows` rows than for one more step."""

    def index(self) -> None:
        """Gets on with preparing drafts, for a small part of a step. Called once a step."""


class RequestDrafts:
    """Holds the drafters of one request: copying and, if there is one, the draft model."""

    __slots__ = ("_tallies", "drafter", "model", "proposal")

    def __init__(self, drafter: Drafter, model: ModelDrafts | None) -> None:
        self.drafter = drafter
        self.model = model
        self.proposal = NOTHING  # verified by the step in flight
        self._tallies: dict[str, list[int]] = {}  # source -> fields of DraftCounts

    @property
    def counts(self) -> list[DraftCounts]:
        return [DraftCounts(source, *tally) for source, tally in self._tallies.items()]

    def count(self, drafted: int, accepted: int) -> None:
        tally = self._tallies.setdefault(self.proposal.source, [0, 0, 0])
        tally[0] += drafted
        tally[1] += accepted
        tally[2] += 1


class Speculation(Feature):
    """Proposes drafts of at most `most` tokens to the scheduler, and verifies them. A draft model, if there is one,
    drafts where nothing better can be copied."""

    def __init__(self, drafting: Drafters[Any], most: int, model: DraftModel | None = None) -> None:
        self._drafting = drafting
        self._model = model
        self._most = most
        self._counts: tuple[DraftCounts, ...] = ()  # totals of ended requests

    # -- as a Feature --------------------------------------------------------------------------------------------

    def started(self, record: RequestRecord, generated: tuple[int, ...]) -> None:
        """Begins to draft for a request that may have drafts. With mirostat none has: its next choice depends on the
        last one."""
        request = record.request
        if request.speculation != 0 and request.max_tokens > 1 and not request.pooling and not record.mirostat:
            model = None if self._model is None else self._model.open()
            record.drafts = RequestDrafts(self._drafting.open(request), model)
            self._append(record, generated)

    def delivered(self, event: Tokens) -> None:
        """Appends new tokens to the drafters. With steps in flight, the drafts come too late for the sequence's next
        row, unless the row waits for them."""
        record = self.engine.records.get(event.seq)
        if record is None:
            return
        self._append(record, event.tokens)
        scheduler = self.engine.scheduler
        if self.engine.pipeline.depth and (sequence := scheduler.sequences.get(event.seq)) is not None:
            sequence.awaits_drafts = self._is_worth_waiting(record, max(len(scheduler.running), 1))

    def ended(self, record: RequestRecord, event: End | None) -> None:
        if record.drafts is not None:
            self._counts = add_drafts((*self._counts, *record.drafts.counts))
            self._drafting.close(record.drafts.drafter)

    def device_waits(self, plan: StepPlan) -> bool:
        """Returns whether the plan has drafts that were copied: the device had nothing to do until they were made."""
        return self._model is None and any(row.draft for row in plan.rows)

    def launched(self, plan: StepPlan, gap: float) -> None:
        if gap:
            self._drafting.observe_gap(len(plan.rows), gap)
        self._drafting.index()

    def revise(self, plan: StepPlan, result: StepResult, seconds: float) -> StepResult:
        """Returns the result of a step without the tokens that were sampled after wrong drafts."""
        drafted = sum(len(row.draft) for row in plan.rows)
        tokens = sum(row.count for row in plan.rows)
        if tokens - drafted == len(plan.rows):  # prompts cost more than their number of tokens
            self._drafting.observe(len(plan.rows), tokens, seconds)
        if not drafted:
            return result
        rows = [self._verify(row, answer) for row, answer in zip(plan.rows, result.rows, strict=True)]
        return StepResult(result.step, tuple(rows))

    def stats(self) -> Mapping[str, Any]:
        return {"drafts": self._counts}

    def hello(self) -> Mapping[str, Any]:
        return {"draft_tokens": self._most}

    # -- as the scheduler's Drafts -------------------------------------------------------------------------------

    def propose(self, asked: Sequence[DraftRoom], rows: int, tokens: int, budget: int) -> list[tuple[int, ...]]:
        records = [self.engine.records[room.seq.id] for room in asked]
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
        parts = zip(asked, records, proposals, lengths, strict=True)
        return [_answerable(record, room, proposal.tokens[:length]) for room, record, proposal, length in parts]

    def halves(self, rows: int) -> bool:
        return self._drafting.halves(rows)

    # -- one request ---------------------------------------------------------------------------------------------

    def _append(self, record: RequestRecord, tokens: Sequence[int]) -> None:
        if record.drafts is not None:
            record.drafts.drafter.append(tokens)
            if record.drafts.model is not None:
                record.drafts.model.append(tokens)

    def _is_worth_waiting(self, record: RequestRecord, rows: int) -> bool:
        """Returns whether a request's drafts, in a step of `rows` rows, are likely to yield more than the step that it
        misses by waiting for them."""
        most = self._limit(record, min(self._drafting.room(rows), AHEAD))
        if most > MISSED:
            proposal = self._propose(record, self._limit(record, self._reach(rows)))  # what the next step may ask for
            if sum(proposal.survival[:most]) > MISSED:
                return True
        if self._model is None or record.drafts is None or record.drafts.model is None or most < 1:
            return False
        return self._model.is_worth_waiting(record.drafts.model, MISSED if rows > 1 else 0.0)

    def _reach(self, rows: int) -> int:
        """Returns the most tokens proposed for one of `rows` rows: more than its share of a step, since others may need
        less."""
        return max(SHARES * self._drafting.room(rows), AHEAD)

    def _limit(self, record: RequestRecord, most: int) -> int:
        asked = record.request.speculation
        return min(most, self._most, self._most if asked is None else asked)

    def _propose(self, record: RequestRecord, most: int) -> Proposal:
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
        if (record := self.engine.records.get(row.seq)) is not None and record.drafts is not None:
            record.drafts.count(len(row.draft), accepted)
        tokens, logprobs = answer.tokens[: accepted + 1], answer.logprobs[: accepted + 1]
        return answer._replace(tokens=tokens, logprobs=logprobs, accepted=accepted)


def _answerable(record: RequestRecord, room: DraftRoom, draft: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a draft up to where its request leaves no token possible: the draft may be wrong before that."""
    return draft[: max(record.sampler.possible(room.seq.tokens, draft) - 1, 0)] if draft else draft
