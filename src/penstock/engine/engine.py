"""Runs requests: they come in, steps are computed, events go out. Threads, text and network are elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from penstock.backend.base import Backend
from penstock.backend.synchronous import SynchronousBackend
from penstock.core import Scheduler
from penstock.core.deadlines import expire, refuse_hopeless
from penstock.core.step_cost import CostModel
from penstock.engine.feature import Feature
from penstock.engine.flight_recorder import FlightRecorder, Memory
from penstock.engine.host_blocks import HostMemory
from penstock.engine.pipeline import StepPipeline
from penstock.engine.request_record import Decided, RequestRecord, append_decided
from penstock.engine.waiting import PATIENCE, Need, WaitingRoom
from penstock.errors import InvalidRequest, PenstockError
from penstock.types import (
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


class Engine:
    """Answers requests: every request that was added ends in exactly one Finished, Aborted or Failed. The pipeline
    computes steps; everything else is a feature (feature.py). assemble.py lists the features."""

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
        self.limits = scheduler.limits
        self.records: dict[int, RequestRecord] = {}
        self.waiting_room = WaitingRoom()
        self.weights = WeightState()
        self.paused = False
        self.asleep = False
        self.recorder = FlightRecorder()
        self._events: list[Event] = []
        self.pipeline = StepPipeline(
            backend,
            scheduler,
            features,
            self.records,
            self.recorder,
            self.emit,
            costs=costs,
            host=host,
            depth=depth,
        )
        self._answers = {kind: feature for feature in features for kind in feature.answers}
        self._token_followers = [each for each in features if type(each).delivered is not Feature.delivered]
        for feature in features:
            feature.engine = self

    @property
    def idle(self) -> bool:
        return not (self.waiting_room or self.computing or any(feature.busy for feature in self.features))

    @property
    def computing(self) -> bool:
        """Returns whether the next step computes something or returns events."""
        return bool((self.scheduler.sequences and not self.paused) or self.pipeline.in_flight or self._events)

    @property
    def slow(self) -> bool:
        return any(feature.slow for feature in self.features)

    def find(self, kind: type[F]) -> F:
        """Returns the feature of a kind; raises LookupError if the engine has none."""
        for feature in self.features:
            if isinstance(feature, kind):
                return feature
        raise LookupError(f"this engine has no {kind.__name__}")

    # -- messages ------------------------------------------------------------------------------------------------

    def handle(self, message: Message) -> None:
        """Handles a message other than Close. The next step returns the answer, or the refusal."""
        id = 0
        try:
            match message:
                case Add(request):
                    id = request.id
                    self.recorder.add(id)  # an error until `add` returns is this request's
                    self.add(request)
                    self.recorder.add()
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

    def add(self, request: Request) -> None:
        """Adds a request; raises PenstockError for a request that could never be answered. The caller never uses an id
        twice. The request starts once its needs are met; if they cannot be, a step returns the failure."""
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
        self.emit([*expire(self.scheduler), *refuse_hopeless(self.scheduler, self.pipeline.costs)])
        self.pipeline.advance(NOTHING if self.paused else self.scheduler.plan())
        for feature in self.features:
            feature.after_step()
        self.pipeline.counters.busy_seconds += time.perf_counter() - began
        events, self._events = self._events, []
        for feature in self.features:
            events = feature.translate(events)
        return events

    def use_idle_moment(self) -> bool:
        """Prepares for later requests, for a few milliseconds; returns False when nothing is left to prepare."""
        if self.asleep:
            return False
        return any(feature.use_idle_moment() for feature in self.features) or self.backend.prepare_in_idle()

    def emit(self, events: Sequence[Event]) -> None:
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
        self.recorder.write_to(memory, slow_first=not isinstance(self.backend, SynchronousBackend))
        self.backend.tell_of_compiling(self.recorder.compile)

    def hello(self) -> dict[str, Any]:
        alone = self.backend.own_memory  # which has room for one engine
        fields: dict[str, Any] = {"limits": self.limits, "can_stand_by": alone, "loads_late": alone}
        for feature in self.features:
            fields |= feature.hello()
        return fields

    def weight_state(self, id: int) -> WeightState:
        return self.weights._replace(seq=id, paused=self.paused)

    def stats(self) -> Stats:
        stats = self.scheduler.stats()
        fields = {key: value for feature in self.features for key, value in feature.stats().items()}
        return stats._replace(
            waiting=stats.waiting + len(self.waiting_room) + sum(feature.waiting for feature in self.features),
            step_seconds=self.pipeline.costs.measured(stats.running),
            prompt_seconds=self.pipeline.costs.spent_on_prompts,
            **self.pipeline.counters.stats(),
            **fields,
        )

    def release_device(self) -> None:
        self.scheduler.cache.flush()
        for feature in self.features:
            feature.release_device()
        self.pipeline.host.release()

    def close(self) -> None:
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
        needs = needs or self._reads(record)
        if not needs:
            self.start(record)
            return
        self.records[record.request.id] = record
        self.waiting_room.enter(record, needs, time.perf_counter())
        self.recorder.hold(self.waiting_room.worked_on)

    def _reads(self, record: RequestRecord) -> Sequence[Need]:
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
        self.records.pop(record.request.id, None)
        self._release(record)
        self.emit(decided.events(record))

    def _release(self, record: RequestRecord, event: Finished | Aborted | Failed | None = None) -> None:
        for feature in self.features:
            feature.ended(record, event)


def check_ids(request: Request, vocab: int) -> None:
    params = request.sampling
    banned = (id for word in request.bad_words for id in word)
    allowed = params.allowed_token_ids or ()
    for name, ids in (("logit_bias", params.logit_bias), ("allowed_token_ids", allowed), ("bad_words", banned)):
        for id in ids:
            if not 0 <= id < vocab:
                raise InvalidRequest(f"{name}: token ids are from 0 to {vocab - 1}; got {id}", param=name)
