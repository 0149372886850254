"""The engine: requests in, steps, events out. No threads, no text, no network."""

from __future__ import annotations

import time
from collections import deque

from penstock.backend.base import Backend, Ticket
from penstock.core import Scheduler, Sequence
from penstock.engine.batch import Batcher
from penstock.engine.sampling import Sampler
from penstock.errors import OutOfMemory, StepFailed
from penstock.types import Event, Limits, Request, Stats, StepPlan, Tokens


class Engine:
    """Every request added ends in exactly one Finished, Aborted or Failed."""

    def __init__(self, backend: Backend, limits: Limits, *, depth: int = 0) -> None:
        self.limits = limits
        self._backend = backend
        self._depth = depth  # steps in flight while the next one is planned
        self._scheduler = Scheduler(limits)
        self._batcher = Batcher(limits)
        self._samplers: dict[int, Sampler] = {}
        self._flight: deque[tuple[StepPlan, Ticket]] = deque()
        self._events: list[Event] = []
        self._busy_seconds = 0.0
        self._short = False  # the last step found too little memory

    @property
    def idle(self) -> bool:
        """Nothing to compute and nothing to tell."""
        return not (self._scheduler.sequences or self._flight or self._events)

    def add(self, request: Request) -> None:
        """Raises InvalidRequest for what could never be answered. Ids are the caller's and never used twice."""
        seq = Sequence(
            request.id,
            request.prompt,
            request.max_tokens,
            stop_ids=request.stop_ids,
            priority=request.priority,
            salt=request.salt,
            score=request.sampling.prompt_logprobs is not None,
            lockstep=Sampler.needs_history(request),
        )
        self._scheduler.add(seq)
        self._samplers[request.id] = Sampler(request)

    def abort(self, id: int) -> None:
        """Ends a request at once; the next step tells so. Unknown ids have ended already."""
        self._tell(self._scheduler.abort(id))

    def step(self) -> list[Event]:
        """Plans and launches a step, commits the oldest one in flight; returns all that happened since last time."""
        began = time.perf_counter()
        plan = self._scheduler.plan()
        self._batcher.follow(plan)
        if plan.rows:
            self._launch(plan)
        if len(self._flight) > self._depth or (self._flight and not plan.rows):
            self._commit(*self._flight.popleft())
        self._busy_seconds += time.perf_counter() - began
        events, self._events = self._events, []
        return events

    def settle(self) -> bool:
        """Uses a moment without requests to make later steps faster; False when nothing is left to do."""
        return self._backend.settle()

    def stats(self) -> Stats:
        return self._scheduler.stats()._replace(busy_seconds=self._busy_seconds)

    def close(self) -> None:
        self._backend.close()

    def _launch(self, plan: StepPlan) -> None:
        try:
            batch = self._batcher.build(plan, self._scheduler.sequences, self._samplers)
            self._flight.append((plan, self._backend.launch(batch)))
            self._short = False
        except OutOfMemory as error:
            self._find_memory(plan, error)
        except Exception as error:
            self._fail(plan, error)

    def _find_memory(self, plan: StepPlan, error: OutOfMemory) -> None:
        """What the backend can spare is given back and the step's sequences are computed again; where that was not
        enough, they fail and no others do."""
        self._backend.relieve()
        if self._short:
            self._fail(plan, error)
        else:
            self._scheduler.redo(plan)
        self._short = not self._short

    def _commit(self, plan: StepPlan, ticket: Ticket) -> None:
        try:
            result = self._backend.wait(ticket)
        except Exception as error:
            self._fail(plan, error)
        else:
            self._tell(self._scheduler.commit(plan, result))

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        message = f"the step that computed this request failed: {type(error).__name__}: {error}"
        code = error.code if isinstance(error, StepFailed) else StepFailed.code
        self._tell(self._scheduler.fail(plan, code, message))

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            if not isinstance(event, Tokens):
                del self._samplers[event.seq]
        self._events += events
