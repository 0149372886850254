"""Drafts with a second, smaller model of the same vocabulary, or with a head, which reads hidden states of the model
itself. Both run as another program over the same KV blocks.

Its KV may be missing or wrong, since nothing but its own drafts is computed from it, and drafts are verified. Where its
KV is right is known by block: a block that is shared through the prefix cache is computed once for all who share it.

A head's row at position i takes the hidden state of position i and token i + 1, and predicts the token after that.
While it drafts, its own output replaces the hidden state of the next position, until the model has verified the draft
and stored its own there. So a head keeps no KV of drafted tokens.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import exp, inf
from typing import NamedTuple

import numpy as np

from penstock.backend.base import Runner, Ticket
from penstock.core.drafting.depths import DraftDepths
from penstock.core.drafting.lengths import MATCHES, NOTHING, Acceptance, Proposal, StreamAcceptance, cells_of
from penstock.core.drafting.rows import DraftRoom
from penstock.core.drafting.suffixes import SINGLE
from penstock.core.prefix import PrefixNode
from penstock.core.sequence import Sequence as TokenSequence
from penstock.engine.batch import DraftRow, draft_batch
from penstock.engine.drafts.drafting import common_prefix
from penstock.engine.request_record import RequestRecord
from penstock.engine.samplers.sampler import Sampler
from penstock.types import Limits, RowResult

DEPTH = "depth"  # source of acceptance by depth, which decides the number of tokens
DEEPEST = 16  # tokens that it drafts for a row
TRUSTED = 4  # matching tokens that a draft counts as, before its acceptance was learned
WORTH = 16  # tokens of a prompt that it computes for each that may still be drafted, at most
DOUBT = 0.7  # the survival of one token more, as it is taken to be before it is known
PATIENT = 4  # steps in a row without a draft after which a row does not wait for one
RETRY = 32  # tokens after which it waits for one again

Seconds = Callable[[int], Sequence[float]]
"""Returns the seconds of the step that is planned with 0, 1, ... drafted tokens, up to so many at least."""


class DraftKind(NamedTuple):
    """Describes a draft model or head."""

    source: str  # the source of its drafts
    shift: int  # positions by which tokens move forward
    behind: int  # tokens that a row has not computed yet, normally, at most
    token_ids: Sequence[int] = ()  # the target's token for each of its own, where it has fewer

    @property
    def is_head(self) -> bool:
        return self.shift > 0


SMALL_MODEL = DraftKind("model", 0, 2)  # behind are the last token, and another one if a whole draft was accepted
MTP_HEAD = DraftKind("mtp", 1, DEEPEST + 1)  # behind: the accepted tokens of its last draft, and the last token


EAGLE3_HEAD = MTP_HEAD._replace(source="eagle3")


class ModelDrafts:
    """Holds the progress and drafts of the draft model for one request. It counts tokens: a head skips the first
    one."""

    __slots__ = (
        *("acceptance", "ahead", "blocks", "computed", "depths", "epoch", "first", "gain", "marked", "proposal"),
        *("refused", "unasked"),
    )

    def __init__(self, acceptance: StreamAcceptance, first: int = 0) -> None:
        self.acceptance = acceptance
        self.first = first
        self.proposal = NOTHING
        self.depths = NOTHING  # the proposal's tokens and the one it was given up before, with cells of depths
        self.gain = inf  # tokens that its last draft was expected to add
        self.refused = 0  # steps without a draft since the last one with one
        self.unasked = 0  # times that something was committed since the model was asked for a draft
        self.epoch = 0  # the admission that what follows belongs to
        self.forget()

    def forget(self) -> None:
        self.computed = self.first  # tokens whose KV is right
        self.ahead: list[int] = []  # tokens drafted after those, whose KV is right as far as they were accepted
        self.blocks: list[int] = []  # in which they lie
        self.marked = 0  # blocks whose node is known to have KV

    def expect(self, gain: float) -> None:
        """Records that it was asked for a draft that is expected to add `gain` tokens; 0: no draft."""
        self.unasked, self.gain = 0, gain
        self.refused = 0 if gain else self.refused + 1

    def is_worth_waiting(self, missed: float) -> bool:
        """Returns whether a row should wait for its draft, which costs `missed` tokens. Call it once per commit. Where
        waiting does not pay, it is tried now and then."""
        self.unasked += 1
        pays = self.refused < PATIENT and (self.refused > 0 or self.gain > missed)
        return pays or self.unasked >= RETRY

    def append(self, tokens: Sequence[int]) -> None:
        for proposal in (self.proposal, self.depths):
            if left := proposal.tokens[: len(tokens)]:
                accepted = common_prefix(left, tokens)
                self.acceptance.observe(proposal, 0, accepted, accepted < len(left))
        self.proposal = self.depths = NOTHING


class DraftTask(NamedTuple):
    """Asks for a draft of at most `most` tokens. `drafts` is None where there may be none."""

    room: DraftRoom
    record: RequestRecord
    drafts: ModelDrafts | None
    most: int


class DraftPlace(NamedTuple):
    """Says where the draft program computes a row."""

    kind: DraftKind
    slot: int
    table: list[int]  # its blocks


class DraftingRow:
    """Is a row whose draft grows by a token with each draft step, to `depth` tokens at most."""

    def __init__(self, task: DraftTask, drafts: ModelDrafts, place: DraftPlace, depth: int) -> None:
        self.place = place
        self.request, self.constraint = task.record.request, task.record.constraint
        self.drafts = drafts
        self._blocks = np.array(place.table, np.int32)
        self.depth = depth
        self.asked = 0  # tokens that were asked for, of which the last may be unknown yet
        self.known = len(task.room.seq.tokens)
        self.text = list(task.room.seq.tokens)
        self.computed = drafts.computed
        self.sampler = task.record.sampler.for_draft(own_vocab=bool(place.kind.token_ids))
        self.cells: tuple[int, ...] = ()  # cells of the drafted tokens
        self.survival: tuple[float, ...] = ()
        self.given_up = False

    @property
    def draft(self) -> list[int]:
        return self.text[self.known :]

    @property
    def needs_history(self) -> bool:
        return Sampler.needs_history(self.request) or self.sampler.constrained

    def goes_on(self, least: float) -> bool:
        return not self.survival or DOUBT * self.survival[-1] >= least

    def ask(self) -> DraftRow:
        self.asked += 1
        return self.step(self.known + self.asked - 1, sample=True)

    def step(self, stop: int, *, sample: bool) -> DraftRow:
        start, self.computed = self.computed, stop
        slot, shift = self.place.slot, self.place.kind.shift
        return DraftRow(self.text, start, stop, self._blocks, self.sampler if sample else None, slot, shift)

    def take(self, token: int, cell: int, least: float) -> None:
        """Takes a token that was chosen, of the draft model's own vocabulary. The draft ends before one that ends the
        answer or that the constraint does not let it draft, and after one with which less than `least` of it
        survives."""
        token = self.place.kind.token_ids[token] if self.place.kind.token_ids else token
        if not self._may_take(token):
            self.depth = 0
            return
        self.text.append(token)
        self.cells += (cell,)
        self.survival = self.drafts.acceptance.survival(self.place.kind.source, self.cells)
        self.given_up = len(self.survival) < len(self.cells) or self.survival[-1] < least
        if self.given_up or len(self.cells) == self.depth:
            self.depth = 0

    def _may_take(self, token: int) -> bool:
        if token in self.request.stop_ids:
            return False
        draft = [*self.draft, token]
        force = self.request.sampling.logprobs is None
        return self.constraint is None or self.constraint.draftable(draft, force=force) == len(draft)

    def propose(self, depth_cells: tuple[int, ...]) -> Proposal:
        draft = tuple(self.draft)
        seen = (*draft, -1) if self.given_up else draft  # no token is -1: it counts as rejected
        self.drafts.depths = Proposal(seen, (), DEPTH, TRUSTED, depth_cells[: len(seen)])
        source = self.place.kind.source
        self.drafts.proposal = Proposal(draft, self.survival, source, TRUSTED, self.cells)
        count = len(self.survival)
        return Proposal(draft[:count], self.survival, source, TRUSTED, self.cells[:count])

    def keep(self, block_size: int) -> None:
        drafts = self.drafts
        drafts.computed = min(self.computed, self.known)
        drafts.ahead = [] if self.place.kind.is_head else self.text[self.known : self.computed]
        drafts.blocks = self.place.table[: -(-self.computed // block_size)]


class DraftStep(NamedTuple):
    """Is a draft step in flight."""

    ticket: Ticket
    rows: Sequence[DraftingRow]
    tokens: int  # computed in the step
    began: float


class DraftModel:
    """Drafts with the model or head that the backend runs as `program`. It computes `context` positions at most. Its KV
    is in the blocks of the target's KV layer group `group`, a group without a window. For a head, that is the first
    such group, where hidden states are. Up to `depth` draft steps are in flight besides the one whose answer it waits
    for."""

    def __init__(
        self,
        backend: Runner,
        limits: Limits,
        context: int,
        *,
        depths: DraftDepths | None = None,
        kind: DraftKind = SMALL_MODEL,
        program: int = 1,
        group: int = 0,
        depth: int = 0,
    ) -> None:
        self._backend = backend
        self._kind = kind
        self._limits = limits
        self._context = min(context, limits.max_len)
        self._depths = depths or DraftDepths()
        self._program = program
        self._group = group
        self._depth = depth
        self._answered = 0.0  # when the last draft step's answer came
        self._numbers = itertools.count(-1, -1)  # step numbers: negative, unlike the target's
        self._unread: list[Ticket] = []  # steps whose drafts had ended, so that nobody waited for them
        self._acceptance = Acceptance()
        self._cells = cells_of(TRUSTED, [SINGLE] * (DEEPEST + 1))  # the cell at each depth
        self._nodes: dict[int, PrefixNode] = {}  # block -> the node whose tokens its KV was computed from
        self._failed = False

    def open(self) -> ModelDrafts:
        return ModelDrafts(StreamAcceptance(self._acceptance), self._kind.shift)

    def propose(
        self, tasks: Sequence[DraftTask], copied: Sequence[Proposal], seconds: Seconds, rows: int, budget: int
    ) -> list[Proposal]:
        """Returns a proposal for each task: its own, or the `copied` one if that is better. A step of `rows` rows
        verifies at most `budget` tokens of them. If the draft model fails, it drafts nothing from then on."""
        chances = [self._chances(task) for task in tasks]
        if self._failed or not any(chances):
            return list(copied)
        others = [proposal.survival for proposal in copied]
        most = min(sum(map(len, (*chances, *others))), max(budget, 0))
        behind = [0 if task.drafts is None else len(task.room.seq.tokens) - 1 - task.drafts.computed for task in tasks]
        depths, least = self._depths.choose(chances, others, seconds(most), rows, budget, behind)
        for task, chance, depth in zip(tasks, chances, depths, strict=True):
            if task.drafts is not None:
                task.drafts.expect(sum(chance[:depth]))
        drafting = {at: row for at, depth in enumerate(depths) if (row := self._begin(tasks[at], depth, at))}
        try:
            self._draft(list(drafting.values()), least)
        except Exception as error:
            import logging  # takes longer than reading the rest

            self._failed = True
            logging.getLogger(__name__).warning("the draft model failed and is not used any more: %s", error)
            return list(copied)
        found = list(copied)
        for at, row in drafting.items():
            if row.cells:
                found[at] = row.propose(self._cells)
        return found

    def _chances(self, task: DraftTask) -> tuple[float, ...]:
        """Returns the survival of each token that could be drafted for a task: empty if the draft model is too far
        behind for the rest of the answer, or if the target has not computed the hidden states that a head needs."""
        seq, drafts = task.room.seq, task.drafts
        most = min(task.most, self._context - len(seq.tokens))
        if drafts is None or most <= 0 or (self._kind.is_head and seq.computed < len(seq.tokens) - 1):
            return ()
        self._find_computed(drafts, seq)
        if len(seq.tokens) - drafts.computed > self._kind.behind + WORTH * (seq.max_len - len(seq.tokens)):
            return ()
        return drafts.acceptance.survival(DEPTH, self._cells)[:most]

    def _find_computed(self, drafts: ModelDrafts, seq: TokenSequence) -> None:
        """Finds out for how many of the sequence's first tokens there is KV of the draft model. That of a head at the
        last position of a shared block is computed again: it depends on the token behind the block."""
        size, table = self._limits.block_size, seq.blocks.tables[self._group]
        if drafts.epoch != seq.standing.admission_epoch:
            drafts.forget()
            drafts.epoch = seq.standing.admission_epoch
        ahead, drafts.ahead = drafts.ahead, []
        drafts.computed += common_prefix(ahead, seq.tokens[drafts.computed : drafts.computed + len(ahead)])
        if drafts.blocks != table[: len(drafts.blocks)]:  # another sequence had computed the same block
            common = max(common_prefix(drafts.blocks, table) * size, drafts.first)
            drafts.computed = min(drafts.computed, common)
        shared = (drafts.computed - drafts.first) // size
        drafts.marked = min(drafts.marked, shared)
        for at in range(drafts.marked, min(shared, len(seq.blocks.nodes))):
            self._nodes[table[at]] = seq.blocks.nodes[at]
            drafts.marked = at + 1
        while shared < len(seq.blocks.nodes) and self._nodes.get(table[shared]) is seq.blocks.nodes[shared]:
            shared += 1
        drafts.computed = min(max(drafts.computed, shared * size), len(seq.tokens) - 1)

    def is_worth_waiting(self, drafts: ModelDrafts, missed: float) -> bool:
        return not self._failed and drafts.is_worth_waiting(missed)

    def _begin(self, task: DraftTask, depth: int, slot: int) -> DraftingRow | None:
        if not depth or task.drafts is None or not task.room.reserve(depth):
            return None
        place = DraftPlace(self._kind, slot, task.room.seq.blocks.tables[self._group])
        return DraftingRow(task, task.drafts, place, depth)

    def _draft(self, rows: list[DraftingRow], least: float) -> None:
        """Drafts for all rows at once, a token for each in every step, while at least `least` of a draft survives. The
        next step is launched before the last answer is known if most drafts are likely to continue."""
        for ticket in self._unread:
            self._backend.wait(ticket)
        self._unread.clear()
        self._catch_up(rows)
        in_flight: deque[DraftStep] = deque()
        depth = 0 if any(row.needs_history for row in rows) else self._depth
        while asking := [row for row in rows if row.asked < row.depth]:
            likely = sum(row.goes_on(least) for row in asking)
            if not in_flight or (len(in_flight) <= depth and 2 * likely >= len(asking)):
                in_flight.append(self._ask(asking))
            else:
                self._answer(in_flight.popleft(), least)
        while in_flight and any(row.depth for row in rows):
            self._answer(in_flight.popleft(), least)
        self._unread += [step.ticket for step in in_flight]
        for row in rows:
            row.keep(self._limits.block_size)

    def _ask(self, rows: Sequence[DraftingRow]) -> DraftStep:
        began, batch = time.perf_counter(), [row.ask() for row in rows]
        ticket = self._launch(batch, rows)
        return DraftStep(ticket, rows, sum(row.stop - row.start for row in batch), began)

    def _answer(self, step: DraftStep, least: float) -> None:
        """Waits for a draft step; its rows take the tokens, unless their drafts have ended."""
        answers = self._wait(step)
        began, self._answered = max(step.began, self._answered), time.perf_counter()
        self._depths.observe(len(step.rows), step.tokens, self._answered - began)
        for row, answer in zip(step.rows, answers, strict=True):
            if row.depth:
                row.take(answer.tokens[-1], cell_of(answer), least)

    def _wait(self, step: DraftStep) -> Sequence[RowResult]:
        return self._backend.wait(step.ticket).rows

    def _catch_up(self, rows: Sequence[DraftingRow]) -> None:
        """Computes missing prompt tokens, within the prefill budget of a step. Rows that miss more draft nothing
        yet."""
        limits = self._limits
        left = limits.step_tokens if len(rows) == 1 else limits.prefill_budget or limits.step_tokens
        late = [row for row in rows if row.known - row.computed > self._kind.behind]
        batch = []
        for row in late:
            stop = min(row.known - 1, row.computed + left)
            left -= stop - row.computed
            if stop > row.computed:
                batch.append(row.step(stop, sample=False))
            if row.computed < row.known - 1:
                row.depth = 0
        if batch:
            began = time.perf_counter()
            self._backend.wait(self._launch(batch, ()))
            tokens = sum(row.stop - row.start for row in batch)
            self._depths.observe(len(batch), tokens, time.perf_counter() - began)

    def _launch(self, batch: Sequence[DraftRow], rows: Sequence[DraftingRow]) -> Ticket:
        made = draft_batch(batch, self._limits.block_size, self._program, next(self._numbers))
        ticket = self._backend.launch(made)
        if len(made.constrained):
            owners = [rows[at] for at in made.constrained.tolist()]
            self._backend.constrain(ticket, np.stack([row.sampler.bitmasks(row.draft)[-1] for row in owners]))
        return ticket


def cell_of(answer: RowResult) -> int:
    """Returns the cell in which the acceptance of a drafted token is learned: the cell of a match whose prior rate is
    about the probability that the draft model gives the token."""
    match = TRUSTED
    if answer.logprobs:
        match = min(max(int(2 / max(1 - exp(answer.logprobs[-1].logprob), 0.01) - 1.75), 1), MATCHES[-1])
    return cells_of(match, [SINGLE])[0]
