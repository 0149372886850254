"""Launches planned steps and commits them in order."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.backend.base import Backend, Ticket
from penstock.core import Scheduler
from penstock.core.step_cost import CostModel
from penstock.engine.batch import Batcher, bitmasks
from penstock.engine.failures import lost_device, step_failure, without_answer
from penstock.engine.feature import Feature
from penstock.engine.flight_recorder import FlightRecorder
from penstock.engine.host_blocks import HostMemory
from penstock.engine.request_record import RequestRecord
from penstock.errors import OutOfMemory
from penstock.types import STEP_SIZES, Event, StepPlan


class Launched(NamedTuple):
    """A step in flight."""

    plan: StepPlan
    ticket: Ticket
    began: float


class StepCounters:
    """Counts the steps that were launched."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self._tokens = 0
        self._sizes = [0] * (len(STEP_SIZES) + 1)

    def add(self, tokens: int) -> None:
        self._tokens += tokens
        self._sizes[bisect_left(STEP_SIZES, tokens)] += 1

    def stats(self) -> Mapping[str, Any]:
        return {
            "busy_seconds": self.busy_seconds,
            "computed_tokens": self._tokens,
            "step_sizes": tuple(self._sizes),
        }


class StepPipeline:
    """Keeps up to `depth` steps in flight while the next one is planned. `costs` learn how long steps take, `host`
    copies KV blocks to and from host memory, and `emit` takes the events of committed steps."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        features: Sequence[Feature],
        records: Mapping[int, RequestRecord],
        recorder: FlightRecorder,
        emit: Callable[[Sequence[Event]], None],
        *,
        costs: CostModel,
        host: HostMemory,
        depth: int,
    ) -> None:
        self.costs = costs
        self.host = host
        self.depth = depth
        self.in_flight: deque[Launched] = deque()
        self.counters = StepCounters()
        self._backend = backend
        self._scheduler = scheduler
        self._features = features
        self._records = records
        self._recorder = recorder
        self._emit = emit
        self._batcher = Batcher(scheduler.limits)
        self._answered = 0.0  # time of the last step's answer
        self._continues = False  # after that step there was more to compute
        self._out_of_memory = False  # the last launch found too little memory

    def advance(self, plan: StepPlan) -> None:
        """Launches a plan, which may be empty, and commits the oldest step if it is due."""
        self._batcher.apply(plan)
        if self._copy(plan) and plan.rows:
            self._launch(plan)
        if len(self.in_flight) > self.depth or (self.in_flight and not plan.rows):
            self._commit(self.in_flight.popleft())

    def drain(self) -> None:
        while self.in_flight:
            self._commit(self.in_flight.popleft())

    def _copy(self, plan: StepPlan) -> bool:
        """Carries out a plan's copies. If one fails, nobody can tell what unused blocks hold: the step's requests fail
        and the prefix cache is emptied; returns False."""
        try:
            self.host.carry_out(plan)
        except Exception as error:
            self._fail(plan, error)
            self.distrust_cache()
            return False
        return True

    def _launch(self, plan: StepPlan) -> None:
        device_waited = self._continues and any(feature.device_waits(plan) for feature in self._features)
        began = self._answered if device_waited else time.perf_counter()
        self._recorder.launch(plan)
        try:
            self.in_flight.append(Launched(plan, self._launch_batch(plan), began))
        except OutOfMemory as error:
            self._find_memory(plan, error)
            return
        except Exception as error:
            self._fail(plan, error)
            return
        self._out_of_memory = False
        gap = time.perf_counter() - began if device_waited and len(self.in_flight) == 1 else 0.0
        for feature in self._features:
            feature.launched(plan, gap)

    def _launch_batch(self, plan: StepPlan) -> Ticket:
        """Launches a plan's rows. Bitmasks follow the launch: the host computes them while a device computes."""
        batch = self._batcher.build(plan, self._scheduler.sequences, self._records)
        ticket = self._backend.launch(batch)
        if len(batch.constrained):
            self._backend.constrain(ticket, bitmasks(plan, batch, self._records))
        self.counters.add(len(batch.tokens))
        return ticket

    def _find_memory(self, plan: StepPlan, error: OutOfMemory) -> None:
        """Frees memory of the backend and queues the step's sequences again. If the previous step lacked memory too,
        the step's requests fail."""
        self._backend.free_memory()
        if self._out_of_memory:
            self._fail(plan, error)
        else:
            self._scheduler.requeue(plan)
        self._out_of_memory = not self._out_of_memory

    def _commit(self, launched: Launched) -> None:
        plan = launched.plan
        try:
            result = self._backend.wait(launched.ticket)
        except Exception as error:
            self._fail(plan, error)
            return
        began, self._answered = max(launched.began, self._answered), time.perf_counter()
        seconds = self._answered - began
        if not plan.loads:
            self.costs.observe(plan.rows, seconds)
        if result.not_finite:
            self._fail_rows(plan, result.not_finite)
        self._recorder.commit(plan, seconds)
        for feature in self._features:
            result = feature.revise(plan, result, seconds)
        self._scheduler.now = time.perf_counter()
        self._emit(self._scheduler.commit(plan, result))
        self._continues = bool(self._scheduler.sequences)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """Fails a step's requests. If no other step can succeed they are left as they are: the engine ends, and its
        starter may resume them in another engine."""
        if self._backend.is_lost():
            raise lost_device(error) from error
        self._emit(self._scheduler.fail(plan, *step_failure(error)))

    def _fail_rows(self, plan: StepPlan, indices: Sequence[int]) -> None:
        vocab = self._scheduler.limits.vocab
        failed, broken = without_answer(plan, indices, self._scheduler.sequences, self._records, vocab)
        for each in failed:
            self._scheduler.abort(each.seq)
        self._emit(failed)
        if broken:
            self.distrust_cache()

    def distrust_cache(self) -> None:
        self._scheduler.cache.flush()
        for feature in self._features:
            feature.distrust_cache()
