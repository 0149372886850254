"""Decides each step: which sequences, which positions, which blocks.

A step is a list of rows and nothing else: chunked prefill, decode, resume after preemption and prompt scoring are
the same row with other numbers. `plan` may be called again before the last plan's `commit`; steps are computed in
the order they were planned, so a block taken back in one plan may be handed out in the next.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import islice
from typing import Any

from penstock.core import hashing
from penstock.core.block_events import BlockEvents
from penstock.core.drafts import DraftRows, Drafts
from penstock.core.kvcache import KvCache
from penstock.core.policy import Policy, Room, ServingLoad, StandardPolicy
from penstock.core.prefix import PrefixNode
from penstock.core.recent import RecentStreams
from penstock.core.refusal import refuse_impossible, refuse_unworkable
from penstock.core.sequence import Sequence
from penstock.errors import InvalidRequest
from penstock.types import (
    Aborted,
    BlockCopy,
    BlockEvent,
    Event,
    Failed,
    Finished,
    Grown,
    Limits,
    Report,
    Row,
    RowResult,
    Stats,
    StepPlan,
    StepResult,
    Tokens,
)

COMPARED = 32  # waiting sequences that a starting one is compared with, for where they diverge


class Scheduler:
    """Plans steps and commits their results. `policy` decides where there is a choice, `drafts` proposes how sequences
    may go on, `chain` computes chain hashes, and block events are recorded under the number `epoch`; None: none are."""

    def __init__(
        self,
        limits: Limits,
        *,
        policy: Policy | None = None,
        drafts: Drafts | None = None,
        chain: hashing.Chain = hashing.chain,
        epoch: int | None = None,
    ) -> None:
        refuse_unworkable(limits)
        self.limits = limits
        self.policy = policy or StandardPolicy(limits)
        self._block_events = None if epoch is None else BlockEvents(epoch)
        self.cache = KvCache(limits, chain, self._block_events)
        self._drafts = DraftRows(drafts, self.cache, limits.step_tokens) if drafts else None
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []  # in policy order, as is `waiting`
        self.waiting: list[Sequence] = []
        self.recent = RecentStreams()
        self.now = 0.0  # set before every call by whoever has a clock
        self._step = 0
        self._arrivals = 0
        self._foreground = self._running_background = 0
        self._grown: list[Grown] = []
        self._dropped: list[int] = []
        self._copies: list[BlockCopy] = []
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = self._preemptions = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Takes a sequence in, or refuses at once what could never be finished. An id is never used twice."""
        if seq.id in self.sequences:
            raise InvalidRequest(f"request id {seq.id} is already in use")
        refuse_impossible(seq, self.limits)
        self._arrivals += 1
        seq.arrival = self._arrivals
        seq.times.arrived = self.now
        self.sequences[seq.id] = seq
        self._foreground += not seq.background
        insort(self.waiting, seq, key=self._order)

    def abort(self, id: int) -> list[Aborted]:
        """Ends a sequence wherever it stands; one that has already ended is left alone."""
        seq = self.sequences.get(id)
        return [] if seq is None else [Aborted(id, self._end(seq))]

    def fail(self, plan: StepPlan, code: str, message: str) -> list[Event]:
        """Ends every sequence of a step that could not be computed."""
        self.cache.states.give_back(*plan.rows)
        failed = [self.sequences[row.seq] for row in plan.rows if row.seq in self.sequences]
        for seq in failed:
            self._end(seq)
        return [Failed(seq.id, code, message) for seq in failed]

    def requeue(self, plan: StepPlan) -> None:
        """Takes back the plan made last, whose step could not be computed: its sequences wait to be computed again."""
        self.cache.states.give_back(*plan.rows)
        for row in plan.rows:
            seq = self.sequences[row.seq]
            if row.sample and seq.end > len(seq.tokens):
                seq.end -= 1  # the token that this row would have sampled
            self.preempt(seq)

    # -- blocks --------------------------------------------------------------------------------------------------

    def copy(self, *copies: BlockCopy) -> None:
        """Has the next plan copy blocks from or to places in host memory."""
        self._copies += copies

    def take_block_events(self) -> list[BlockEvent]:
        """Returns what entered and left the prefix cache since the last call, if that is recorded."""
        return self._block_events.take() if self._block_events else []

    # -- one step ------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Decides the next step. Every plan is to be carried out, also one without rows."""
        self._step += 1
        self.cache.states.open_step()
        if self.policy.dynamic:
            self.running.sort(key=self._order)
            self.waiting.sort(key=self._order)
        rows: list[Row] = []
        preemptions = self._preemptions
        budget = self._plan_running(rows)
        if self.waiting and preemptions == self._preemptions:
            self._admit(rows, budget)
        rows = self.cache.states.assign_saves(rows, self.sequences)
        if self._drafts is not None:
            self._grown += self._drafts.extend(rows, self.sequences, len(self.running))
        plan = StepPlan(self._step, tuple(rows), tuple(self._grown), tuple(self._dropped), tuple(self._copies))
        self._grown, self._dropped, self._copies = [], [], []
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Takes a step's answer in. Rows of sequences that ended meanwhile are ignored."""
        events: list[Event] = []
        for row, answer in zip(plan.rows, result.rows, strict=True):
            seq = self.sequences.get(row.seq)
            if seq is None:
                self.cache.states.give_back(row)
                continue
            tokens, stop = self._append(seq, answer.tokens)
            if plan.step < seq.admission_epoch:  # preempted meanwhile: its tokens count, its KV is gone
                self.cache.states.give_back(row)
            else:
                self._advance(seq, row, answer.accepted)
            events += self._told(seq, row, answer, tokens, stop)
        return events

    def stats(self) -> Stats:
        """Returns how many sequences and blocks there are, and what was counted so far."""
        cached = self.cache.trie.idle_blocks
        free = len(self.cache.pool)
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_free=free,
            blocks_used=self.limits.num_blocks - free - cached,
            blocks_cached=cached,
            steps=self._step,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
        )

    # -- planning ------------------------------------------------------------------------------------------------

    def _order(self, seq: Sequence) -> Any:
        return self.policy.order(seq, self.now)

    def _plan_running(self, rows: list[Row]) -> int:
        """Adds a row for every running sequence that has something to compute; returns the tokens left over."""
        answering = sum(seq.end > seq.prompt_len for seq in self.running)
        budget = self.policy.step_tokens(len(self.running), answering)
        index, held = 0, self._drafts.held(self.running) if self._drafts is not None else ()
        while index < len(self.running):
            seq = self.running[index]
            index += 1
            wanted = seq.end - seq.planned
            if wanted == 0 or seq.must_wait or seq.id in held:
                continue
            count = self.policy.share(wanted, budget, len(self.running) - index)
            if count > 1:
                count = self.cache.states.clip(seq, count)
            count = self._make_room(seq, count, index)
            if count:
                budget -= count
                rows.append(self._row(seq, count))
        return budget

    def _make_room(self, seq: Sequence, count: int, index: int) -> int:
        """Preempts some of running[index:] until `count` more positions fit; returns how many do."""
        spare = seq.capacity - seq.planned
        if count <= spare:
            return count
        cache = self.cache
        missing = cache.blocks_for(count - spare) * cache.groups
        while missing > cache.available and len(self.running) > index:
            self.preempt(self.policy.victim(self.running, index, self.now))
        return min(count, spare + cache.available // cache.groups * cache.block_size)

    def _row(self, seq: Sequence, count: int, begin: int = -1) -> Row:
        start = seq.planned
        if seq.restore >= 0:
            begin, seq.restore = seq.restore, -1
        if start + count > seq.capacity:
            self._grown += self.cache.grow(seq, start + count)
        seq.planned = start + count
        sample = 0
        if seq.planned == seq.end and seq.end < seq.max_len:
            seq.end += 1
            sample = 1
        return Row(seq.id, start, count, count if seq.scored < seq.prompt_len else sample, begin)

    # -- admission -----------------------------------------------------------------------------------------------

    def _admit(self, rows: list[Row], budget: int) -> None:
        """Lets waiting sequences in, in order, until one does not fit. One whose next block is just being computed
        by another is passed over until it can reuse it."""
        reserved = sum(map(self.cache.reserved, self.running))
        index = 0
        while budget > 0 and index < len(self.waiting) and len(self.running) < self.limits.max_rows:
            seq = self.waiting[index]
            if self._should_wait(seq):
                index += 1
                continue
            load = ServingLoad(len(self.running), self._running_background, self._foreground)
            if not self.policy.may_start(seq, budget, load, self.now):
                break
            known = self.cache.match(seq)
            matched = self.cache.usable(known)
            seq.awaited_hash = self.cache.awaited(seq, len(matched), self.sequences)
            if seq.awaited_hash is not None:
                continue
            needed, idle = self.cache.needed(seq, matched)
            room = Room(self.cache.available - idle, needed, reserved, len(self.running), self.cache.groups)
            if not self.policy.fits(room):
                break
            del self.waiting[index]
            row = self._start(seq, known, matched, budget)
            rows.append(row)
            budget -= row.count
            reserved += self.cache.reserved(seq)

    def _should_wait(self, seq: Sequence) -> bool:
        """Returns whether a token of the sequence, or a block that it can reuse, is still in flight."""
        return seq.end > len(seq.tokens) or seq.awaited_hash in self.cache.in_flight

    def _start(self, seq: Sequence, known: list[PrefixNode], matched: list[PrefixNode], budget: int) -> Row:
        """Makes a waiting sequence run on its matched prefix; returns its first row."""
        cache = self.cache
        self._grown += cache.open(seq, matched, len(known))
        insort(self.running, seq, key=self._order)
        self._running_background += seq.background
        seq.computed = seq.planned = seq.capacity
        seq.admission_epoch = self._step
        seq.times.recomputed += max(seq.times.lost - seq.computed, 0)
        if seq.cached < 0:
            self._note_first_admission(seq)
        waiting = islice(self.waiting, COMPARED)
        begin = cache.states.begin(seq, matched, len(known), lambda: cache.divergence(seq, waiting))
        count = cache.states.clip(seq, self.policy.share(seq.end - seq.planned, budget, 0))
        return self._row(seq, self._make_room(seq, count, len(self.running)), begin)

    def _note_first_admission(self, seq: Sequence) -> None:
        seq.cached = min(seq.computed, seq.prompt_len)
        self._prompt_tokens += seq.prompt_len
        self._cached_tokens += seq.cached
        seq.times.admitted = self.now
        if seq.explain:
            seq.times.nearest = self.recent.nearest(seq)

    # -- committing ----------------------------------------------------------------------------------------------

    def _advance(self, seq: Sequence, row: Row, accepted: int) -> None:
        """Takes note of the positions that a row has computed. Those of a draft that was wrong do not count."""
        seq.computed = self.cache.states.settle(seq, row, accepted)
        seq.planned = seq.computed if row.draft else seq.planned
        if seq.computed >= seq.next_full:
            self._grown += self.cache.advance(seq, row)

    def _told(
        self, seq: Sequence, row: Row, answer: RowResult, tokens: tuple[int, ...], stop: int | None
    ) -> Iterator[Event]:
        """Yields the events of an answer whose tokens were appended."""
        if scores := answer.scores:  # scores[i] is of token start + 1 + i; a resumed prompt may bring some again
            scores = scores[max(seq.scored - row.start - 1, 0) :]
            seq.scored += len(scores)
        if tokens and seq.times.answered is None:
            seq.times.answered = self.now
        if tokens or scores:
            logprobs = answer.logprobs[: len(tokens)]
            yield Tokens(seq.id, tokens, logprobs, scores, seq.cached)
        if stop is not None:
            yield Finished(seq.id, "stop", stop, report=self._end(seq))
        elif len(seq.tokens) == seq.max_len and (tokens or answer.pooled or seq.computed == seq.max_len):
            reason = "pooled" if answer.pooled else "length"
            yield Finished(seq.id, reason, None, answer.pooled, self._end(seq))

    def _append(self, seq: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], int | None]:
        """Appends sampled tokens up to the one that ends the sequence; returns those appended and that one."""
        tokens, stop = seq.until_end(tokens)
        seq.tokens += tokens
        seq.end = max(seq.end, len(seq.tokens))  # more may come than were asked for: their KV is still to do
        seq.drafted = seq.drafted and not tokens  # a chunk before the draft's row brings none
        self._generated_tokens += len(tokens)
        return tokens, stop

    # -- leaving -------------------------------------------------------------------------------------------------

    def preempt(self, seq: Sequence) -> None:
        """Sends a running sequence back to wait: its blocks go, its tokens stay."""
        self._preemptions += 1
        seq.times.preemptions += 1
        seq.times.lost = seq.computed
        self._leave(seq)
        seq.computed = seq.planned = 0
        seq.admission_epoch = self._step
        insort(self.waiting, seq, key=self._order)

    def _end(self, seq: Sequence) -> Report:
        del self.sequences[seq.id]
        self._foreground -= not seq.background
        self._leave(seq)
        self.recent.keep(seq)
        return seq.times.report(seq.cached, self.now)

    def _leave(self, seq: Sequence) -> None:
        """Takes a sequence out of its queue, and its blocks and block tables from it. Only running ones have any. It is
        found by identity, because its place in the order may have changed."""
        if not seq.tables:
            self.waiting.remove(seq)
            return
        self.running.remove(seq)
        self._running_background -= seq.background
        self.cache.release(seq)
        self._grown = [grown for grown in self._grown if grown.seq != seq.id]
        self._dropped.append(seq.id)
