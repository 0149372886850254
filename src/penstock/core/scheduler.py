"""Decides each step: which sequences, which positions, which blocks.

A step is a list of rows and nothing else: chunked prefill, decode, resume after preemption and prompt scoring are
the same row with other numbers. `plan` may be called again before the last plan's `commit`; steps are computed in
the order they were planned, so a block taken back in one plan may be handed out in the next.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice

from penstock.core import policy
from penstock.core.kvcache import KvCache
from penstock.core.prefix import Node
from penstock.core.recent import Recent
from penstock.core.sequence import Sequence
from penstock.errors import ConfigError, ContextTooLong, InvalidRequest
from penstock.types import (
    Aborted,
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

SEEN = 32  # waiting sequences that one is compared with, for where they part
ROLLING = 4  # blocks of an answer from one saved state to the next


class Scheduler:
    def __init__(self, limits: Limits) -> None:
        if limits.step_tokens < limits.max_rows:
            raise ConfigError(f"a step of {limits.step_tokens} tokens cannot serve {limits.max_rows} rows")
        if limits.encoder and limits.max_len > limits.step_tokens:
            raise ConfigError(f"a step of {limits.step_tokens} tokens cannot hold one sequence of {limits.max_len}")
        if limits.max_len > limits.num_blocks * limits.block_size:
            raise ConfigError(f"{limits.num_blocks} blocks cannot hold one sequence of {limits.max_len} tokens")
        self.limits = limits
        self.cache = KvCache(limits.num_blocks, limits.block_size, limits.states)
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []  # in policy order, as is `waiting`
        self.waiting: list[Sequence] = []
        self.recent = Recent()
        self.now = 0.0  # told before every call by whoever has a clock
        self._step = 0
        self._arrivals = 0
        self._grown: list[Grown] = []
        self._dropped: list[int] = []
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = self._preemptions = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Takes a sequence in, or refuses at once what could never be finished. An id is never used twice."""
        self._refuse_impossible(seq)
        self._arrivals += 1
        seq.arrival = self._arrivals
        seq.ledger.arrived = self.now
        self.sequences[seq.id] = seq
        insort(self.waiting, seq, key=policy.order)

    def abort(self, id: int) -> list[Event]:
        """Ends a sequence wherever it stands; one that has already ended is left alone."""
        seq = self.sequences.get(id)
        if seq is None:
            return []
        return [Aborted(id, self._end(seq))]

    def fail(self, plan: StepPlan, code: str, message: str) -> list[Event]:
        """Ends every sequence of a step that could not be computed."""
        self._waive_saves(plan)
        failed = [self.sequences[row.seq] for row in plan.rows if row.seq in self.sequences]
        for seq in failed:
            self._end(seq)
        return [Failed(seq.id, code, message) for seq in failed]

    def redo(self, plan: StepPlan) -> None:
        """Takes back the plan made last, whose step could not be computed: its sequences wait to be computed again."""
        self._waive_saves(plan)
        for row in plan.rows:
            seq = self.sequences[row.seq]
            if row.sample and seq.end > len(seq.tokens):
                seq.end -= 1  # the token that this row would have sampled
            self._preempt(seq)

    # -- one step ------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        self._step += 1
        self.cache.states.open_step()
        rows: list[Row] = []
        preemptions = self._preemptions
        budget = self._plan_running(rows)
        if self.waiting and preemptions == self._preemptions:
            self._admit(rows, budget)
        plan = StepPlan(self._step, tuple(rows), tuple(self._grown), tuple(self._dropped))
        self._grown, self._dropped = [], []
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Takes a step's answer in. Rows of sequences that ended meanwhile are ignored."""
        events: list[Event] = []
        for row, answer in zip(plan.rows, result.rows, strict=True):
            seq = self.sequences.get(row.seq)
            current = seq is not None and plan.step >= seq.since
            if row.save >= 0 and not current:
                self.cache.states.give_back(row.save)
            if seq is None:
                continue
            if current:
                seq.computed = row.start + row.count
                if seq.computed // self.cache.block_size > len(seq.nodes) and not seq.private:
                    self._grown += [Grown(seq.id, at, (block,)) for at, block in self.cache.enter(seq)]
                if seq.saving:
                    seq.saving = [at for at in seq.saving if at > seq.computed]
                if row.save >= 0:
                    self._keep_state(seq, row)
            self._take_answer(seq, row, answer, events)
        return events

    def stats(self) -> Stats:
        cached = self.cache.trie.idle
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

    def _plan_running(self, rows: list[Row]) -> int:
        """A row for every running sequence that has something to compute; returns the tokens left over."""
        answering = sum(seq.end > seq.prompt_len for seq in self.running)
        budget = policy.step_tokens(self.limits, len(self.running), answering)
        index = 0
        while index < len(self.running):
            seq = self.running[index]
            index += 1
            wanted = seq.end - seq.planned
            if wanted == 0 or (seq.lockstep and seq.end > len(seq.tokens)):
                continue
            count = policy.share(wanted, budget, len(self.running) - index)
            if seq.saving:
                count = policy.up_to_saves(seq, count)
            count = self._make_room(seq, count, index)
            if count:
                budget -= count
                rows.append(self._row(seq, count))
        return budget

    def _make_room(self, seq: Sequence, count: int, index: int) -> int:
        """Preempts from the back of the line until `count` more positions fit; returns how many do."""
        size = self.cache.block_size
        spare = len(seq.blocks) * size - seq.planned
        if count <= spare:
            return count
        missing = self.cache.blocks_for(count - spare)
        while missing > self.cache.available and len(self.running) > index:
            self._preempt(self.running[-1])
        return min(count, spare + self.cache.available * size)

    def _row(self, seq: Sequence, count: int, begin: int = -1) -> Row:
        start = seq.planned
        if start + count > len(seq.blocks) * self.cache.block_size:
            at = len(seq.blocks)
            self._grown.append(Grown(seq.id, at, self.cache.grow(seq, start + count)))
        seq.planned = start + count
        sample = 0
        if seq.planned == seq.end and seq.end < seq.max_len:
            seq.end += 1
            sample = 1
        row = Row(seq.id, start, count, count if seq.scored < seq.prompt_len else sample, begin)
        return self._with_save(seq, row) if self.cache.states.total else row

    def _with_save(self, seq: Sequence, row: Row) -> Row:
        at = 0 if seq.private else policy.save_position(seq, row.start, ROLLING * self.cache.block_size)
        place = self.cache.states.take() if at else None
        return row if place is None else row._replace(save=place, at=at)

    # -- admission -----------------------------------------------------------------------------------------------

    def _admit(self, rows: list[Row], budget: int) -> None:
        """Lets waiting sequences in, in order, until one does not fit. One whose next block is just being computed
        by another is passed over until it can reuse it."""
        owed = sum(self._owed(seq) for seq in self.running)
        index = 0
        while budget > 0 and index < len(self.waiting) and len(self.running) < self.limits.max_rows:
            seq = self.waiting[index]
            if self._should_wait(seq):
                index += 1
                continue
            if not policy.starts(self.limits, seq.end, budget):
                break
            known = self.cache.match(seq)
            matched = self.cache.usable(known)
            seq.awaits = self.cache.awaited(seq, len(matched), self.sequences)
            if seq.awaits is not None:
                continue
            needed = self.cache.blocks_for(seq.end) - len(matched)
            available = self.cache.available - sum(node.holders == 0 for node in matched)
            if not policy.admits(available, needed, owed, len(self.running)):
                break
            del self.waiting[index]
            self._start(seq, matched)
            begin = self._begin_state(seq, matched, len(known)) if self.cache.states.total else -1
            count = policy.up_to_saves(seq, policy.share(seq.end - seq.planned, budget, 0))
            row = self._row(seq, count, begin)
            rows.append(row)
            budget -= row.count
            owed += self._owed(seq)

    def _should_wait(self, seq: Sequence) -> bool:
        in_flight = seq.end > len(seq.tokens)
        return in_flight or seq.awaits in self.cache.promised

    def _start(self, seq: Sequence, matched: list[Node]) -> None:
        self.cache.open(seq, matched)
        insort(self.running, seq, key=policy.order)
        seq.computed = seq.planned = len(matched) * self.cache.block_size
        seq.since = self._step
        if matched:
            self._grown.append(Grown(seq.id, 0, tuple(seq.blocks)))
        seq.ledger.recomputed += max(seq.ledger.lost - seq.computed, 0)
        if seq.cached < 0:
            self._enter(seq)

    def _begin_state(self, seq: Sequence, matched: list[Node], known: int) -> int:
        """Decides where the state of a sequence that starts is saved; returns where it begins. What is known of its
        tokens beyond that shows where prompts part: the next to come that far shall find a state there."""
        if not seq.private:
            size, limits = self.cache.block_size, self.limits
            asked = (known * size, self.cache.parting(seq, islice(self.waiting, SEEN)))
            spacing = self.cache.blocks_for(limits.step_tokens) * size
            seq.saving = policy.save_positions(seq, size, spacing, limits.states, asked)
        return self.cache.states.read(matched[-1]) if matched else -1

    def _enter(self, seq: Sequence) -> None:
        """For the first time."""
        seq.cached = min(seq.computed, seq.prompt_len)
        self._prompt_tokens += seq.prompt_len
        self._cached_tokens += seq.cached
        seq.ledger.admitted = self.now
        if seq.explain:
            seq.ledger.nearest = self.recent.nearest(seq)

    def _refuse_impossible(self, seq: Sequence) -> None:
        limits = self.limits
        if seq.id in self.sequences:
            raise InvalidRequest(f"request id {seq.id} is already in use")
        if not seq.prompt_len:
            raise InvalidRequest("the prompt is empty: at least one token is needed")
        if seq.max_len > limits.max_len:
            answer = seq.max_len - seq.prompt_len
            raise ContextTooLong(
                f"the prompt has {seq.prompt_len} tokens and {answer} more may follow, together {seq.max_len}; "
                f"the context holds {limits.max_len}: shorten the prompt or lower max_tokens"
            )
        if min(seq.tokens) < 0 or max(seq.tokens) >= limits.vocab:
            raise InvalidRequest(f"prompt token ids must be from 0 to {limits.vocab - 1}")

    def _owed(self, seq: Sequence) -> int:
        return self.cache.blocks_for(seq.end) - len(seq.blocks)

    # -- committing ----------------------------------------------------------------------------------------------

    def _take_answer(self, seq: Sequence, row: Row, answer: RowResult, events: list[Event]) -> None:
        tokens, stop = self._append(seq, answer.tokens)
        seq.end = max(seq.end, len(seq.tokens))  # more may come than were asked for: their KV is still to do
        scores = answer.scores
        if scores:  # scores[i] is of token start + 1 + i; a resumed prompt may bring some again
            scores = scores[max(seq.scored - row.start - 1, 0) :]
            seq.scored += len(scores)
        if tokens and seq.ledger.answered is None:
            seq.ledger.answered = self.now
        if tokens or scores:
            logprobs = answer.logprobs[: len(tokens)]
            events.append(Tokens(seq.id, tokens, logprobs, scores, seq.cached))
        if stop is not None:
            events.append(Finished(seq.id, "stop", stop, report=self._end(seq)))
        elif len(seq.tokens) == seq.max_len and (tokens or answer.pooled or seq.computed == seq.max_len):
            reason = "pooled" if answer.pooled else "length"
            events.append(Finished(seq.id, reason, None, answer.pooled, self._end(seq)))

    def _keep_state(self, seq: Sequence, row: Row) -> None:
        """In an answer only the latest is kept."""
        states, node = self.cache.states, seq.nodes[row.at // self.cache.block_size - 1]
        states.keep(row.save, node)
        if row.at > seq.prompt_len:
            if seq.rolling:
                states.forget(seq.rolling)
            seq.rolling = node

    def _waive_saves(self, plan: StepPlan) -> None:
        for row in plan.rows:
            if row.save >= 0:
                self.cache.states.give_back(row.save)

    def _append(self, seq: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], int | None]:
        """Takes sampled tokens up to the one that ends the sequence; returns those taken and that one."""
        tokens = tokens[: seq.max_len - len(seq.tokens)]
        stop = None
        for count, token in enumerate(tokens, 1):
            if token in seq.stop_ids:
                tokens, stop = tokens[:count], token
                break
        seq.tokens += tokens
        self._generated_tokens += len(tokens)
        return tokens, stop

    # -- leaving -------------------------------------------------------------------------------------------------

    def _preempt(self, seq: Sequence) -> None:
        """Sends a running sequence back to wait: its blocks go, its tokens stay."""
        self._preemptions += 1
        seq.ledger.preemptions += 1
        seq.ledger.lost = seq.computed
        self._leave(seq)
        seq.computed = seq.planned = 0
        seq.since = self._step
        insort(self.waiting, seq, key=policy.order)

    def _end(self, seq: Sequence) -> Report:
        del self.sequences[seq.id]
        self._leave(seq)
        self.recent.keep(seq)
        return seq.ledger.report(seq.cached, self.now)

    def _leave(self, seq: Sequence) -> None:
        """Takes a sequence out of its line, and its blocks and block table from it. Only running ones have blocks."""
        line = self.running if seq.blocks else self.waiting
        del line[bisect_left(line, policy.order(seq), key=policy.order)]
        if seq.blocks:
            self.cache.release(seq)
            seq.saving, seq.rolling = [], None
            self._grown = [grown for grown in self._grown if grown.seq != seq.id]
            self._dropped.append(seq.id)
