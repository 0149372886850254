"""Runs requests: they come in, steps are computed, events go out. It has no threads, no text and no network."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from penstock.backend.base import Backend, Ticket
from penstock.backend.synchronous import SynchronousBackend
from penstock.core import Scheduler
from penstock.core.deadlines import expire, refuse_hopeless
from penstock.core.requeue import requeue
from penstock.core.step_cost import CostModel
from penstock.engine.batch import Batcher, bitmasks
from penstock.engine.failures import lost_device, step_failure, without_answer
from penstock.engine.feature import Feature
from penstock.engine.flight_recorder import FlightRecorder, Memory
from penstock.engine.host_blocks import HostMemory
from penstock.engine.record import RequestRecord
from penstock.engine.refusals import check_ids
from penstock.engine.resuming import Decided, append_decided
from penstock.engine.waiting import PATIENCE, Need, WaitingRoom
from penstock.errors import InvalidRequest, OutOfMemory, PenstockError
from penstock.types import (
    STEP_SIZES,
    Aborted,
    Event,
    Failed,
    Finished,
    Request,
    Stats,
    StepPlan,
    Tokens,
    WeightState,
)
from penstock.types.messages import Abort, Add, Close, FlushCache, Message, Release

NOTHING = StepPlan(0, ())  # the plan of a paused engine

F = TypeVar("F", bound=Feature)


class Launched(NamedTuple):
    """A step in flight."""

    plan: StepPlan
    ticket: Ticket
    began: float


class Engine:
    """Answers requests: every request that was added ends in exactly one Finished, Aborted or Failed. Up to `depth`
    steps are in flight while the next one is planned. `costs` learn how long steps take, and `host` copies KV blocks to
    and from host memory. Whatever else an engine can do is a feature (feature.py); assemble.py lists them."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        features: Sequence[Feature],
        *,
        costs: CostModel,
        host: HostMemory,
        depth: int = 0,
    ) -> None:
        self.backend = backend
        self.scheduler = scheduler
        self.features = features
        self.costs = costs
        self.host = host
        self.limits = scheduler.limits
        self.records: dict[int, RequestRecord] = {}
        self.waiting_room = WaitingRoom()
        self.in_flight: deque[Launched] = deque()
        self.weights = WeightState()
        self.paused = False
        self.asleep = False
        self.recorder = FlightRecorder()
        self.depth = depth
        self._batcher = Batcher(self.limits)
        self._events: list[Event] = []
        self._answered = 0.0  # when the last step's answer came
        self._continues = False  # after that step there was more to compute
        self._out_of_memory = False  # the last launch found too little memory
        self._busy_seconds = 0.0
        self._computed_tokens = 0
        self._step_sizes = [0] * (len(STEP_SIZES) + 1)
        self._answers = {kind: feature for feature in features for kind in feature.answers}
        self._token_followers = [each for each in features if type(each).delivered is not Feature.delivered]
        for feature in features:
            feature.join(self)

    @property
    def idle(self) -> bool:
        """Returns whether there is nothing to compute and no event to return."""
        return not (self.waiting_room or self.computing or any(feature.busy for feature in self.features))

    @property
    def computing(self) -> bool:
        """Returns whether the next step computes something or returns events."""
        return bool((self.scheduler.sequences and not self.paused) or self.in_flight or self._events)

    @property
    def slow(self) -> bool:
        """Returns whether the next step may take as long as loading weights does."""
        return any(feature.slow for feature in self.features)

    def find(self, kind: type[F]) -> F:
        """Returns the feature of a kind; raises LookupError if the engine has none."""
        for feature in self.features:
            if isinstance(feature, kind):
                return feature
        raise LookupError(f"this engine has no {kind.__name__}")

    # -- messages ------------------------------------------------------------------------------------------------

    def handle(self, message: Message) -> None:
        """Does what a message asks, other than Close. The next step returns the answer, or the refusal."""
        id = 0
        try:
            match message:
                case Add(request):
                    id = request.id
                    self.take(request)
                case Abort(aborted):
                    self.abort(aborted)
                case FlushCache():
                    self.flush_cache()
                case Release():
                    self.emit(self._answers[Release].answer(message))
                case Close():
                    pass
                case _:
                    id = message.id
                    self.emit(self._answers[type(message)].answer(message))
        except PenstockError as error:
            self.recorder.add()  # the refused request is not suspected of a later death
            self._events.append(Failed(id, error.code, error.message))

    def take(self, request: Request) -> None:
        """Adds a request, and records that an error meanwhile is the request's."""
        self.recorder.add(request.id)
        self.add(request)
        self.recorder.add()

    def add(self, request: Request) -> None:
        """Adds a request; raises PenstockError for a request that could never be answered. Ids are the caller's and are
        never used twice. The request starts once it has what it needs; if it cannot have that, a step returns the
        failure."""
        if request.id in self.records:
            raise InvalidRequest(f"request id {request.id} is already in use")
        check_ids(request, self.limits.vocab)
        record = RequestRecord(request, self.limits.vocab)
        try:
            self._begin(record, [need for feature in self.features for need in feature.needs(record)])
        except PenstockError:
            self._release(record)
            raise

    def abort(self, id: int) -> None:
        """Ends a request at once; the next step returns the event. Unknown ids have ended already."""
        self.scheduler.now = time.perf_counter()
        self.emit([Aborted(id)] if self.drop(id) else self.scheduler.abort(id))

    def drop(self, id: int) -> bool:
        """Forgets a request that has not started; returns whether there was one with this id."""
        return self.waiting_room.drops(id) or any(feature.drops(id) for feature in self.features)

    def flush_cache(self) -> None:
        """Empties the prefix cache, on disk too. Blocks that a running request holds stay until it ends."""
        self.scheduler.cache.flush()
        for feature in self.features:
            feature.flush()

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Plans and launches a step, commits the oldest one in flight; returns all that happened since last time."""
        for feature in self.features:
            feature.before_plan()
        if self.waiting_room:
            self._start_ready()
        began = self.scheduler.now = time.perf_counter()
        self.emit([*expire(self.scheduler), *refuse_hopeless(self.scheduler, self.costs)])
        plan = NOTHING if self.paused else self.scheduler.plan()
        self._batcher.apply(plan)
        if self._copy(plan) and plan.rows:
            self._launch(plan)
        if len(self.in_flight) > self.depth or (self.in_flight and not plan.rows):
            self._commit(self.in_flight.popleft())
        for feature in self.features:
            feature.after_step()
        self._busy_seconds += time.perf_counter() - began
        events, self._events = self._events, []
        for feature in self.features:
            events = feature.translate(events)
        return events

    def drain(self) -> None:
        """Commits all steps in flight."""
        while self.in_flight:
            self._commit(self.in_flight.popleft())

    def use_idle_moment(self) -> bool:
        """Prepares for later requests, for a few milliseconds; returns False when nothing is left to prepare."""
        if self.asleep:
            return False
        return any(feature.use_idle_moment() for feature in self.features) or self.backend.prepare_in_idle()

    def emit(self, events: Sequence[Event]) -> None:
        """Keeps events for the step's caller. A request that ends is forgotten."""
        for event in events:
            if isinstance(event, Tokens):
                for feature in self._token_followers:
                    feature.delivered(event)
                if (record := self.records.get(event.seq)) is not None:
                    event = record.complete_tokens(event)
            elif isinstance(event, Finished | Aborted | Failed) and (record := self.records.pop(event.seq, None)):
                self._release(record, event)
                event = record.complete(event)
            self._events.append(event)

    # -- the engine ----------------------------------------------------------------------------------------------

    def record_flight(self, memory: Memory) -> None:
        """Records what the engine does in memory that outlives it. The first step of each size may be slow, where the
        device compiles kernels for it."""
        self.recorder = FlightRecorder(memory, slow_first=not isinstance(self.backend, SynchronousBackend))
        self.backend.tell_of_compiling(self.recorder.compile)

    def hello(self) -> dict[str, Any]:
        """Returns the fields of a Hello that the engine and its features know."""
        on_gpu = self.backend.device.startswith("cuda")  # which has memory for one engine at a time
        fields: dict[str, Any] = {"limits": self.limits, "can_stand_by": on_gpu, "loads_late": on_gpu}
        for feature in self.features:
            fields |= feature.hello()
        return fields

    def weight_state(self, id: int) -> WeightState:
        """Returns which weights are loaded, as the answer to a message."""
        return self.weights._replace(seq=id, paused=self.paused)

    def stats(self) -> Stats:
        """Returns the engine's state and counters."""
        stats = self.scheduler.stats()
        fields = {key: value for feature in self.features for key, value in feature.stats().items()}
        return stats._replace(
            busy_seconds=self._busy_seconds,
            waiting=stats.waiting + len(self.waiting_room) + sum(feature.waiting for feature in self.features),
            computed_tokens=self._computed_tokens,
            step_sizes=tuple(self._step_sizes),
            step_seconds=self.costs.measured(stats.running),
            prompt_seconds=self.costs.spent_on_prompts,
            **fields,
        )

    def release_device(self) -> None:
        """Forgets the prefix cache and gives back the memory that features and host copies hold."""
        self.scheduler.cache.flush()
        for feature in self.features:
            feature.release_device()
        self.host.release()

    def close(self) -> None:
        """Gives the backend's memory back."""
        for feature in self.features:
            feature.close()
        self.backend.close()

    # -- starting a request --------------------------------------------------------------------------------------

    def start(self, record: RequestRecord) -> None:
        """Queues a request that is ready to run, unless a feature holds it."""
        request = record.request
        self.scheduler.now = time.perf_counter()
        sequence = record.sequence(not record.pools_from_start and not self.limits.encoder, self.weights)
        if any(feature.holds(record, sequence) for feature in self.features):
            self.records[request.id] = record
            return
        decided = append_decided(sequence, record.owed)
        if decided.ended:
            self._end_resumed(record, decided)
            return
        self.scheduler.add(sequence)
        self.records[request.id] = record
        for feature in self.features:
            feature.started(record, request.generated + decided.tokens)
        record.owed = decided.tokens

    def _begin(self, record: RequestRecord, needs: Sequence[Need]) -> None:
        """Starts a request, or lets it wait for what it needs."""
        needs = needs or self._reads(record)
        if not needs:
            self.start(record)
            return
        self.records[record.request.id] = record
        self.waiting_room.enter(record, needs, time.perf_counter())
        self.recorder.hold(self.waiting_room.worked_on)

    def _reads(self, record: RequestRecord) -> Sequence[Need]:
        """Returns the KV blocks that a request should wait for, from the first feature that has some."""
        return next((reads for feature in self.features if (reads := feature.reads(record))), ())

    def _start_ready(self) -> None:
        """Starts the requests that have what they waited for. If there is nothing to compute, it waits a little."""
        if not self.computing:
            self.waiting_room.wait(PATIENCE)
        for record, (need, *others) in self.waiting_room.take_ready(time.perf_counter()):
            try:
                need.deliver()
                self._begin(record, others)
            except PenstockError as error:
                self.emit([Failed(record.request.id, error.code, error.message)])
        self.recorder.hold(self.waiting_room.worked_on)

    def _end_resumed(self, record: RequestRecord, decided: Decided) -> None:
        """Ends a resumed request that has nothing left to compute."""
        self.records.pop(record.request.id, None)
        self._release(record)
        self.emit(decided.events(record))

    def _release(self, record: RequestRecord, event: Finished | Aborted | Failed | None = None) -> None:
        for feature in self.features:
            feature.ended(record, event)

    # -- one step ------------------------------------------------------------------------------------------------

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
        device_waited = self._continues and any(feature.device_waits(plan) for feature in self.features)
        began = self._answered if device_waited else time.perf_counter()
        self.recorder.launch(plan)
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
        for feature in self.features:
            feature.launched(plan, gap)

    def _launch_batch(self, plan: StepPlan) -> Ticket:
        """Launches a plan's rows. Bitmasks follow the launch: the host computes them while a device computes."""
        batch = self._batcher.build(plan, self.scheduler.sequences, self.records)
        ticket = self.backend.launch(batch)
        if len(batch.constrained):
            self.backend.constrain(ticket, bitmasks(plan, batch, self.records))
        self._computed_tokens += (size := len(batch.tokens))
        self._step_sizes[bisect_left(STEP_SIZES, size)] += 1
        return ticket

    def _find_memory(self, plan: StepPlan, error: OutOfMemory) -> None:
        """Has the backend free memory and queues the step's sequences again. If the step before lacked memory too, the
        step's requests fail."""
        self.backend.free_memory()
        if self._out_of_memory:
            self._fail(plan, error)
        else:
            requeue(self.scheduler, plan)
        self._out_of_memory = not self._out_of_memory

    def _commit(self, launched: Launched) -> None:
        plan = launched.plan
        try:
            result = self.backend.wait(launched.ticket)
        except Exception as error:
            self._fail(plan, error)
            return
        began, self._answered = max(launched.began, self._answered), time.perf_counter()
        seconds = self._answered - began
        if not plan.loads:
            self.costs.observe(plan.rows, seconds)
        if result.not_finite:
            self._fail_rows(plan, result.not_finite)
        self.recorder.commit(plan, seconds)
        for feature in self.features:
            result = feature.revise(plan, result, seconds)
        self.scheduler.now = time.perf_counter()
        self.emit(self.scheduler.commit(plan, result))
        self._continues = bool(self.scheduler.sequences)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """Fails a step's requests. If no other step can succeed they are left as they are: the engine ends, and its
        starter may resume them in another engine."""
        if self.backend.is_lost():
            raise lost_device(error) from error
        self.emit(self.scheduler.fail(plan, *step_failure(error)))

    def _fail_rows(self, plan: StepPlan, indices: Sequence[int]) -> None:
        """Fails the requests of rows that have no answer, and drops cached prefixes if they may have none either."""
        failed, broken = without_answer(plan, indices, self.scheduler.sequences, self.records, self.limits.vocab)
        for each in failed:
            self.scheduler.abort(each.seq)
        self.emit(failed)
        if broken:
            self.distrust_cache()

    def distrust_cache(self) -> None:
        """Empties the prefix cache, whose blocks may be wrong."""
        self.scheduler.cache.flush()
        for feature in self.features:
            feature.distrust_cache()
