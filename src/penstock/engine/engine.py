"""The engine: requests in, steps, events out. No threads, no text, no network."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from dataclasses import replace
from typing import NamedTuple

from penstock.backend.base import Backend, Ticket
from penstock.core import Policy, Scheduler, Sequence, hashing
from penstock.engine.batch import Batcher
from penstock.engine.grammar import Compiling, Constraint, Grammars
from penstock.engine.pooling import pools
from penstock.engine.sampling import Sampler, bitmasks
from penstock.errors import InvalidGrammar, InvalidRequest, OutOfMemory, PenstockError, StepFailed
from penstock.types import (
    STEP_SIZES,
    Aborted,
    Event,
    Failed,
    Finished,
    Limits,
    Request,
    Row,
    RowResult,
    Stats,
    StepPlan,
    StepResult,
    Tokens,
)

PATIENCE = 0.002  # seconds between two looks at what has arrived, when there is nothing to do but wait for a grammar


class Uncompiled(NamedTuple):
    request: Request
    compiling: Compiling
    since: float


class Engine:
    """Every request added ends in exactly one Finished, Aborted or Failed."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        *,
        depth: int = 0,
        grammars: Grammars | None = None,
        policy: Policy | None = None,
        chain: hashing.Chain = hashing.chain,
    ) -> None:
        self.limits = limits
        self._grammars = grammars
        self._uncompiled: dict[int, Uncompiled] = {}  # requests that wait for their grammar
        self._constraints: dict[int, Constraint] = {}
        self._backend = backend
        self._depth = depth  # steps in flight while the next one is planned
        self._scheduler = Scheduler(limits, policy=policy, chain=chain)
        self._batcher = Batcher(limits)
        self._samplers: dict[int, Sampler] = {}
        self._pooling: dict[int, str] = {}  # how the requests that want an embedding are pooled
        self._flight: deque[tuple[StepPlan, Ticket]] = deque()
        self._events: list[Event] = []
        self._busy_seconds = 0.0
        self._short = False  # the last step found too little memory
        self._computed = 0
        self._step_sizes = [0] * (len(STEP_SIZES) + 1)

    @property
    def idle(self) -> bool:
        """Nothing to compute and nothing to tell."""
        return not (self._uncompiled or self._computing)

    @property
    def _computing(self) -> bool:
        return bool(self._scheduler.sequences or self._flight or self._events)

    def add(self, request: Request) -> None:
        """Raises InvalidRequest for what could never be answered. Ids are the caller's and never used twice. One with
        a grammar starts when that is compiled: what is wrong with it is told by a step."""
        if self.limits.encoder and not request.pooling:
            raise InvalidRequest("this model makes embeddings and no text: ask for one", param="model")
        grammar = request.sampling.grammar
        if grammar is not None and grammar.thinking and grammar.thinking.budget is not None:
            _refuse_scores(request)
        if grammar is None:
            self._start(request)
        elif grammar.kind == "free":
            self._start_following(request, Constraint.free(grammar.thinking))
        elif self._grammars is None:
            raise InvalidGrammar("this engine has no vocabulary to hold answers to a grammar with")
        else:
            compiling = self._grammars.compile(grammar)
            self._uncompiled[request.id] = Uncompiled(request, compiling, time.perf_counter())

    def _start(self, request: Request, constraint: Constraint | None = None) -> None:
        seq = Sequence(
            request.id,
            request.prompt,
            request.max_tokens,
            stop_ids=request.stop_ids,
            priority=request.priority,
            salt=request.salt,
            score=request.sampling.prompt_logprobs is not None,
            lockstep=Sampler.needs_history(request),
            prefix_cache=request.pooling != "mean" and not self.limits.encoder,
            owner=request.owner,
            explain=request.explain,
            background=request.background,
        )
        self._scheduler.now = time.perf_counter()
        self._scheduler.add(seq)
        self._samplers[request.id] = Sampler(request, constraint)
        if request.pooling:
            self._pooling[request.id] = request.pooling

    def abort(self, id: int) -> None:
        """Ends a request at once; the next step tells so. Unknown ids have ended already."""
        self._scheduler.now = time.perf_counter()
        waiting = self._uncompiled.pop(id, None)
        self._tell([Aborted(id)] if waiting else self._scheduler.abort(id))

    def step(self) -> list[Event]:
        """Plans and launches a step, commits the oldest one in flight; returns all that happened since last time."""
        if self._uncompiled:
            self._start_compiled()
        began = self._scheduler.now = time.perf_counter()
        plan = self._scheduler.plan()
        self._batcher.apply(plan)
        if plan.rows:
            self._launch(plan)
        if len(self._flight) > self._depth or (self._flight and not plan.rows):
            self._commit(*self._flight.popleft())
        self._busy_seconds += time.perf_counter() - began
        events, self._events = self._events, []
        return events

    def settle(self) -> bool:
        """Uses a moment without requests to make later steps faster; False when nothing is left to do."""
        return self._backend.prepare_in_idle()

    def stats(self) -> Stats:
        stats = self._scheduler.stats()
        costs = vars(self._grammars.costs) if self._grammars is not None else {}
        waiting = stats.waiting + len(self._uncompiled)
        sizes = tuple(self._step_sizes)
        return stats._replace(
            busy_seconds=self._busy_seconds, waiting=waiting, computed_tokens=self._computed, step_sizes=sizes, **costs
        )

    def close(self) -> None:
        self._backend.close()

    def _launch(self, plan: StepPlan) -> None:
        try:
            batch = self._batcher.build(plan, self._scheduler.sequences, self._samplers)
            if self._pooling:
                batch = replace(batch, pools=pools(plan, self._scheduler.sequences, self._pooling))
            ticket = self._backend.launch(batch)
            if len(batch.constrained):
                self._backend.constrain(ticket, bitmasks(plan, batch, self._samplers))
            self._flight.append((plan, ticket))
            self._short = False
            self._computed += (size := len(batch.tokens))
            self._step_sizes[bisect_left(STEP_SIZES, size)] += 1
        except OutOfMemory as error:
            self._find_memory(plan, error)
        except Exception as error:
            self._fail(plan, error)

    def _find_memory(self, plan: StepPlan, error: OutOfMemory) -> None:
        """What the backend can spare is given back and the step's sequences are computed again; where that was not
        enough, they fail and no others do."""
        self._backend.free_memory()
        if self._short:
            self._fail(plan, error)
        else:
            self._scheduler.requeue(plan)
        self._short = not self._short

    def _commit(self, plan: StepPlan, ticket: Ticket) -> None:
        try:
            result = self._backend.wait(ticket)
        except Exception as error:
            self._fail(plan, error)
        else:
            if self._constraints:
                result = self._follow_grammars(plan, result)
            self._scheduler.now = time.perf_counter()
            self._tell(self._scheduler.commit(plan, result))

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        message = f"the step that computed this request failed: {type(error).__name__}: {error}"
        code = error.code if isinstance(error, StepFailed) else StepFailed.code
        self._tell(self._scheduler.fail(plan, code, message))

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            if not isinstance(event, Tokens):
                self._samplers.pop(event.seq, None)
                self._pooling.pop(event.seq, None)
                if constraint := self._constraints.pop(event.seq, None):
                    event = _with_grammar(event, constraint)
            self._events.append(event)

    # -- grammars ------------------------------------------------------------------------------------------------

    def _start_compiled(self) -> None:
        if not self._computing:
            next(iter(self._uncompiled.values())).compiling.wait(PATIENCE)
        for entry in [entry for entry in self._uncompiled.values() if entry.compiling.ready]:
            del self._uncompiled[entry.request.id]
            try:
                self._start_constrained(entry)
            except PenstockError as error:
                self._tell([Failed(entry.request.id, error.code, error.message)])

    def _start_constrained(self, entry: Uncompiled) -> None:
        """It ends where its grammar does, whatever else it is told to go on for."""
        grammars, request = self._grammars, entry.request
        assert grammars is not None
        assert request.sampling.grammar is not None
        constraint = grammars.follow(entry.compiling, request.sampling.grammar)
        constraint.waited = time.perf_counter() - entry.since
        self._start_following(request._replace(stop_ids=request.stop_ids | constraint.ends), constraint)

    def _start_following(self, request: Request, constraint: Constraint) -> None:
        self._start(request, constraint)
        self._constraints[request.id] = constraint

    def _follow_grammars(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result, with the tokens that grammars force after those that were sampled."""
        rows = [self._follow_grammar(row, answer) for row, answer in zip(plan.rows, result.rows, strict=True)]
        return StepResult(result.step, tuple(rows))

    def _follow_grammar(self, row: Row, answer: RowResult) -> RowResult:
        constraint = self._constraints.get(row.seq)
        if constraint is None or not answer.tokens:
            return answer
        try:
            forced = constraint.take(*answer.tokens, force=not answer.logprobs)
        except InvalidGrammar as error:
            self._scheduler.abort(row.seq)
            self._tell([Failed(row.seq, error.code, error.message)])
            return answer
        return answer._replace(tokens=answer.tokens + forced)


def _refuse_scores(request: Request) -> None:
    """What ends the thoughts is not sampled, so it has no logprobs."""
    if request.sampling.logprobs is not None:
        raise InvalidRequest("a budget for thinking and logprobs cannot be honoured together", param="logprobs")


def _with_grammar(event: Finished | Aborted | Failed, constraint: Constraint) -> Event:
    """Told in the report, where there is one."""
    if isinstance(event, Failed) or event.report is None:
        return event
    report = event.report._replace(compiling=constraint.waited, forced=constraint.forced)
    return event._replace(report=report)
