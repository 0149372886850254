"""Decides each step: which sequences, which positions, which blocks.

A step is a list of rows and nothing else: chunked prefill, decode, resume after preemption and prompt scoring are
the same row with other numbers. `plan` may be called again before the last plan's `commit`; steps are computed in
the order they were planned, so a block taken back in one plan may be handed out in the next.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

from penstock.core import hashing
from penstock.core.block_events import BlockWatcher
from penstock.core.counters import Counters
from penstock.core.drafting.rows import DraftRows, Drafts, NoDraftRows
from penstock.core.kvcache import KvCache
from penstock.core.policy import Policy, Room, StandardPolicy, StepBudget
from penstock.core.prefix import PrefixNode
from penstock.core.recent import RecentStreams
from penstock.core.sequence import Sequence
from penstock.core.tenants import PER_GENERATED, Tenants, Turns
from penstock.core.tiers import CopyCosts
from penstock.errors import ContextTooLong, InvalidRequest
from penstock.types import (
    Aborted,
    BlockCopy,
    Event,
    Failed,
    Finished,
    Limits,
    Report,
    Row,
    RowResult,
    Stats,
    StepPlan,
    StepResult,
    TableUpdate,
    Tokens,
)

COMPARED = 32  # waiting sequences that a starting one is compared with, for where they diverge


class Scheduler:
    """Plans steps and commits their results. `policy` decides where there is a choice, `drafts` proposes tokens,
    `chain` computes chain hashes, `watchers` follow the prefix cache, and `copy_costs` decide whether copying blocks to
    and from host memory pays."""

    def __init__(
        self,
        limits: Limits,
        *,
        policy: Policy | None = None,
        drafts: Drafts | None = None,
        chain: hashing.Chain = hashing.chain,
        watchers: Iterable[BlockWatcher] = (),
        copy_costs: CopyCosts | None = None,
    ) -> None:
        limits.check()
        self.limits = limits
        self.policy = policy or StandardPolicy(limits)
        self.cache = KvCache(limits, chain, watchers, copy_costs)
        self._drafts = DraftRows(drafts, self.cache, limits.step_tokens) if drafts else NoDraftRows()
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []  # in policy order
        self.tenants = Tenants(self.policy.order)  # they hold all waiting sequences
        self.recent = RecentStreams()
        self.now = 0.0  # the caller sets it before every call
        self._step = 0
        self._arrivals = 0
        self._squeezed: Sequence | None = None  # was next in turn in the last plan and found too few blocks
        self._grown: list[TableUpdate] = []
        self._dropped: list[int] = []
        self._counters = Counters()

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        if seq.id in self.sequences:
            raise InvalidRequest(f"request id {seq.id} is already in use")
        self.check(seq)
        self._arrivals += 1
        seq.arrive(self._arrivals, self.now)
        seq.standing.rank = self.policy.rank(seq, self.cache.prefixes.held(seq))
        self.sequences[seq.id] = seq
        self.tenants.add(seq)

    def check(self, seq: Sequence) -> None:
        """Raises InvalidRequest for a sequence that could never finish within the limits."""
        if not seq.prompt_len:
            raise InvalidRequest("the prompt is empty: at least one token is needed")
        if seq.max_len > self.limits.max_len:
            answer = seq.max_len - seq.prompt_len
            raise ContextTooLong(
                f"the prompt has {seq.prompt_len} tokens and {answer} more may follow, together {seq.max_len}; "
                f"the context holds {self.limits.max_len}: shorten the prompt or lower max_tokens"
            )
        if min(seq.tokens) < 0 or max(seq.tokens) >= self.limits.vocab:
            raise InvalidRequest(f"prompt token ids must be from 0 to {self.limits.vocab - 1}")

    def abort(self, id: int) -> list[Aborted]:
        """Ends a sequence in any state; unknown ids have ended already."""
        seq = self.sequences.get(id)
        return [] if seq is None else [Aborted(id, self._end(seq))]

    def fail(self, plan: StepPlan, code: str, message: str) -> list[Event]:
        self.cache.saving.give_back(*plan.rows)
        failed = [self.sequences[row.seq] for row in plan.rows if row.seq in self.sequences]
        for seq in failed:
            self._end(seq)
        return [Failed(seq.id, code, message) for seq in failed]

    def requeue(self, plan: StepPlan) -> None:
        """Takes back the plan made last, whose step could not be computed: its sequences wait again."""
        self.cache.saving.give_back(*plan.rows)
        for row in plan.rows:
            seq = self.sequences[row.seq]
            if row.sample and seq.end > len(seq.tokens):
                seq.end -= 1  # the token that this row would have sampled
            self.preempt(seq)

    def change_salts(self, salts: Mapping[int, str], recompute: bool) -> None:
        """Gives all sequences new salts, by id, because the weights have changed: nothing computed with the old weights
        is reused. With `recompute` running sequences are preempted and their KV is computed again; otherwise they keep
        it, unshared. No step may be in flight."""
        for seq in list(self.running):
            if recompute:
                self.preempt(seq)
            else:
                self.cache.isolate(seq)
        for seq in self.sequences.values():
            seq.blocks.salt, seq.blocks.hashes, seq.blocks.awaited = salts[seq.id], [], None
        self.cache.flush()
        self.recent = RecentStreams()

    # -- blocks --------------------------------------------------------------------------------------------------

    def copy(self, *copies: BlockCopy) -> None:
        self.cache.host.copies += copies

    # -- one step ------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Decides the next step. Every plan is to be carried out, also one without rows."""
        self._step += 1
        self.cache.open_step()
        ahead = self.tenants.next(self.policy.turn) if len(self.tenants) > 1 else None
        self._make_way(ahead)
        rows, preemptions = list[Row](), self._counters.preemptions
        held = self.policy.held_back(ahead, self.running)
        budget, begun = self._plan_answers(rows, held)
        if begun or self.tenants.waiting:
            self._plan_prompts(rows, budget, begun, preemptions)
        if held and not rows:
            self._plan_answers(rows, ())
        rows = self.cache.saving.assign_saves(rows, self.sequences)
        self._grown += self._drafts.extend(rows, self.sequences, len(self.running))
        plan = StepPlan(
            self._step,
            tuple(rows),
            tuple(self._grown),
            tuple(self._dropped),
            self.cache.take_copies(),
            self.cache.states.take_copies(),
        )
        self._grown, self._dropped = [], []
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Takes a step's answer in. Rows of sequences that ended meanwhile are ignored."""
        events: list[Event] = []
        for row, answer in zip(plan.rows, result.rows, strict=True):
            seq = self.sequences.get(row.seq)
            if seq is None:
                self.cache.saving.give_back(row)
                continue
            tokens, stop = self._append(seq, answer.tokens)
            if plan.step < seq.standing.admission_epoch:  # preempted meanwhile: its tokens count, its KV is gone
                self.cache.saving.give_back(row)
            else:
                self._advance(seq, row, min(answer.accepted, len(tokens)))  # a cut token was never computed
            events += self._told(seq, row, answer, tokens, stop)
        return events

    def stats(self) -> Stats:
        return self._counters.stats(self.cache, self._step, len(self.running), self.tenants)

    # -- planning ------------------------------------------------------------------------------------------------

    def _make_way(self, seq: Sequence | None) -> None:
        """Preempts a sequence, if the policy chooses one, for the next waiting sequence that finds no row or too few
        blocks."""
        if seq is None:
            return
        full = len(self.running) >= self.limits.max_rows or seq is self._squeezed
        if not full or self.cache.in_flight.must_wait(seq):
            return
        if (victim := self.policy.displaced(seq, self.running, self.cache.host.room)) is not None:
            self.preempt(victim)

    def _plan_answers(self, rows: list[Row], held: Collection[int]) -> tuple[StepBudget, list[Sequence]]:
        """Adds a row for every running sequence that continues its answer, except `held` ones. Returns the budget that
        is left, and the running sequences whose prompts are not computed yet, or lost."""
        budget = self.policy.budget(self.running, [tenant.line[0] for tenant in self.tenants.in_line()])
        begun, behind = list[Sequence](), len(self.running)
        held = self._drafts.held(self.running, held)
        for seq in list(self.running):
            behind -= 1
            wanted = seq.end - seq.planned
            if wanted == 0 or seq.must_wait or seq.id in held or not seq.blocks.tables:  # or it was just preempted
                continue
            if seq.planned < seq.prompt_len or seq.planned < seq.times.lost:
                begun.append(seq)
            elif count := self._fit(rows, seq, budget.share(wanted, behind)):
                budget.spend(count)
                rows.append(self._row(seq, count))
        return budget, begun

    def _fit(self, rows: list[Row], seq: Sequence, count: int) -> int:
        """Returns how many of `count` more positions of a running sequence fit. Until they do, running sequences are
        preempted that come after it and have no row yet."""
        if count > 1:
            count = self.cache.saving.clip(seq, count)
        spare = seq.blocks.capacity - seq.planned
        if count <= spare:
            return count
        cache = self.cache
        missing = cache.blocks_for(count - spare) * cache.groups
        if missing > cache.available:
            planned = {row.seq for row in rows}
            after = self.running[self.running.index(seq) + 1 :]
            behind = [each for each in after if each.id not in planned]
            while missing > cache.available and behind:
                victim = self.policy.victim(behind, cache.host.room)
                behind.remove(victim)
                self.preempt(victim)
        return min(count, spare + cache.available // cache.groups * cache.block_size)

    def _row(self, seq: Sequence, count: int, begin: int = -1) -> Row:
        start = seq.planned
        if seq.states.restore >= 0:
            begin, seq.states.restore = seq.states.restore, -1
        if start + count > seq.blocks.capacity:
            self._grown += self.cache.grow(seq, start + count)
        seq.planned = start + count
        if start < seq.prompt_len:
            seq.standing.tenant.charge(seq.new_prompt_work(start))
        sample = 0
        if seq.planned == seq.end and seq.end < seq.max_len:
            seq.end += 1
            sample = 1
        return Row(seq.id, start, count, count if seq.scored < seq.prompt_len else sample, begin)

    # -- admission -----------------------------------------------------------------------------------------------

    def _plan_prompts(self, rows: list[Row], budget: StepBudget, begun: list[Sequence], preemptions: int) -> None:
        """Gives the rest of a step to prompts in turn, begun and waiting ones, until one does not fit. If there were
        more `preemptions` than this, no waiting one may start."""
        budget.reserved = sum(map(self.cache.reserved, self.running))
        turns = Turns(begun, self.tenants.in_line(), self.policy.turn)
        if preemptions != self._counters.preemptions:
            turns.close()
        for seq in turns:
            if budget.tokens <= 0:
                break
            if seq.waits:
                fits = self.cache.in_flight.must_wait(seq) or self._admit(seq, rows, budget)
            else:
                if count := self._fit(rows, seq, budget.prompt_share(seq.end - seq.planned, seq.planned)):
                    rows.append(row := self._row(seq, count))
                    budget.spend_on_prompt(row)
                fits = preemptions == self._counters.preemptions
            if not fits:
                turns.close()

    def _admit(self, seq: Sequence, rows: list[Row], budget: StepBudget) -> bool:
        """Starts a waiting sequence; returns False if it does not fit. If another sequence is computing its next block,
        it is passed over until it can reuse the block."""
        full = len(self.running) >= self.limits.max_rows
        if full or not self.policy.may_start(seq, budget, self.tenants.load(len(self.running))):
            return False
        known = self.cache.prefixes.match(seq)
        matched = self.cache.prefixes.usable(known)
        seq.blocks.awaited = self.cache.in_flight.awaited(seq, len(matched), self.sequences)
        if seq.blocks.awaited is not None:
            return True
        needed, idle = self.cache.needed(seq, matched)
        room = Room(self.cache.available - idle, needed, budget.reserved, self.cache.groups, self.tenants.reach)
        if not self.policy.fits(seq, room, self.running):
            self._squeezed = seq
            return False
        rows.append(row := self._start(seq, known, matched, budget))
        budget.spend_on_prompt(row)
        budget.hurried |= seq.standing.tenant.running == 1 < len(self.running)
        budget.reserved += self.cache.reserved(seq)
        return True

    def _start(self, seq: Sequence, known: list[PrefixNode], matched: list[PrefixNode], budget: StepBudget) -> Row:
        cache = self.cache
        self.tenants.start(seq)
        seq.computed, grown = cache.open(seq, matched, known)
        self._grown += grown
        insort(self.running, seq, key=self.policy.order)
        seq.planned = seq.computed
        seq.standing.admission_epoch = self._step
        seq.times.recomputed += max(seq.times.lost - seq.computed, 0)
        if seq.times.cached < 0:
            self._counters.admit(seq, self.now)
            if seq.params.explain:
                seq.times.nearest = self.recent.nearest(seq)
        waiting = islice(seq.standing.tenant.line, COMPARED)
        begin = cache.saving.begin(seq, matched, len(known), lambda: cache.in_flight.divergence(seq, waiting))
        share = budget.prompt_share(seq.end - seq.planned, seq.planned)
        count = min(share, seq.blocks.capacity - seq.planned + cache.available // cache.groups * cache.block_size)
        return self._row(seq, cache.saving.clip(seq, count), begin)

    # -- committing ----------------------------------------------------------------------------------------------

    def _advance(self, seq: Sequence, row: Row, accepted: int) -> None:
        seq.computed = self.cache.saving.settle(seq, row, accepted)
        seq.planned = seq.computed if row.draft else seq.planned
        if seq.computed >= seq.blocks.next_full:
            self._grown += self.cache.advance(seq, row)

    def _told(
        self, seq: Sequence, row: Row, answer: RowResult, tokens: tuple[int, ...], stop: int | None
    ) -> Iterator[Event]:
        scores = seq.new_scores(row.start, answer.scores)
        if tokens and seq.times.answered is None:
            self.tenants.answer(seq, self.now)
        if tokens or scores:
            logprobs = answer.logprobs[: len(tokens)]
            yield Tokens(seq.id, tokens, logprobs, scores, seq.times.cached)
        if stop is not None:
            yield Finished(seq.id, "stop", stop, report=self._end(seq))
        elif len(seq.tokens) == seq.max_len and (tokens or answer.pooled or seq.computed == seq.max_len):
            reason = "pooled" if answer.pooled else "length"
            yield Finished(seq.id, reason, None, answer.pooled, self._end(seq))

    def _append(self, seq: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], int | None]:
        tokens, stop = seq.append(tokens)
        seq.drafted = seq.drafted and not tokens  # a chunk before the draft's row brings none
        self._counters.generated_tokens += len(tokens)
        seq.standing.tenant.charge(PER_GENERATED * len(tokens))
        return tokens, stop

    # -- leaving -------------------------------------------------------------------------------------------------

    def preempt(self, seq: Sequence) -> None:
        """Sends a running sequence back to wait: its blocks go, its tokens stay."""
        self._counters.preemptions += 1
        seq.times.preemptions += 1
        seq.times.lost = seq.computed
        self._leave(seq)
        seq.computed = seq.planned = 0
        seq.standing.admission_epoch = self._step
        self.tenants.wait(seq)

    def _end(self, seq: Sequence) -> Report:
        del self.sequences[seq.id]
        self._leave(seq)
        self.tenants.end(seq)
        self.policy.ended(seq)
        self.recent.keep(seq)
        return seq.times.report(self.now)

    def _leave(self, seq: Sequence) -> None:
        if seq.waits:
            self.tenants.take(seq)
            return
        self.running.remove(seq)
        self.tenants.stop(seq)
        self.cache.release(seq)
        self._grown = [grown for grown in self._grown if grown.seq != seq.id]
        self._dropped.append(seq.id)
