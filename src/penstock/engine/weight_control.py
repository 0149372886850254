"""Carries out what control messages ask about pauses and weights: the part of the engine that does."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from penstock.backend.base import Ticket
from penstock.core import Scheduler
from penstock.core.new_weights import change_salts
from penstock.engine.kv_ledger import KvLedger
from penstock.engine.pausing import PauseState
from penstock.engine.reading import Reading
from penstock.engine.record import RequestRecord
from penstock.engine.sleep_state import SleepState
from penstock.engine.waiting import WaitingRoom
from penstock.engine.weight_messages import (
    AbortAll,
    DescribeWeights,
    Pause,
    Resume,
    UpdateWeights,
    WeightMessage,
)
from penstock.engine.weights import MAX_VERSION, ReadWeights, WeightReader
from penstock.errors import EngineUnavailable, PenstockError, WeightsError
from penstock.model.classifier import ClassifierHead, DenseHead
from penstock.types import PAUSE_ABORT, PAUSE_WAIT, Event, Failed, Finished, StepPlan, WeightState

ABORTED = "all requests were aborted before this one was answered: send it again"
PATIENCE = 0.002  # seconds between two looks at what has arrived, when all requests wait for something


class WeightControl(ABC):
    """Pauses an engine and replaces its weights. The engine is the one that derives from it."""

    _scheduler: Scheduler
    _records: dict[int, RequestRecord]
    _waiting_room: WaitingRoom
    _in_flight: deque[tuple[StepPlan, Ticket, float]]
    _sleep: SleepState
    _classifier: ClassifierHead | None
    _dense: DenseHead | None

    def __init__(self, weights: WeightReader | None, ledger: KvLedger | None) -> None:
        self._weights = weights
        self._ledger = ledger
        self._weight_state = WeightState()
        self._update: tuple[UpdateWeights, Reading[ReadWeights]] | None = None  # whose weights are being read
        self._pause = PauseState()

    @property
    def can_stand_by(self) -> bool:
        """Returns whether another process can have the same KV cache open, and take over when this one ends."""
        return self._ledger is not None

    @property
    @abstractmethod
    def _computing(self) -> bool: ...

    @abstractmethod
    def _emit(self, events: Sequence[Event]) -> None: ...

    @abstractmethod
    def _start(self, record: RequestRecord) -> None: ...

    @abstractmethod
    def _commit(self, plan: StepPlan, ticket: Ticket, began: float) -> None: ...

    def control_weights(self, message: WeightMessage) -> None:
        """Pauses, resumes, or has weights read; a step returns the answer. Raises what cannot be done at once."""
        match message:
            case Pause(id, mode):
                if mode == PAUSE_ABORT:
                    self._abort_all()
                self._pause.begin(id, self._records if mode == PAUSE_WAIT else ())
            case Resume(id):
                self._resume()
                self._answer(id)
            case AbortAll(id):
                self._abort_all()
                self._answer(id)
            case UpdateWeights():
                self._update = message, self._begin_update(message)
            case DescribeWeights(id):
                self._answer(id)

    def _answer(self, id: int) -> None:
        """Answers a message about pauses and weights with what holds now."""
        paused = self._pause.paused
        self._emit([self._weight_state._replace(seq=id, paused=paused)])

    def _answer_pauses(self) -> None:
        """Answers those who asked for a pause that has begun: nothing is in flight."""
        self._pause.note(self._records.keys())
        if not self._in_flight:
            for id in self._pause.take_asked():
                self._answer(id)

    def _resume(self) -> None:
        for record in self._pause.end(time.perf_counter()):
            try:
                self._start(record)
            except PenstockError as error:
                self._emit([Failed(record.request.id, error.code, error.message)])

    def _abort_all(self) -> None:
        """Ends all requests with what they have so far. What has no part, such as an embedding, fails."""
        self._scheduler.now = time.perf_counter()
        for id, record in list(self._records.items()):
            if id in self._scheduler.sequences:
                (ended,) = self._scheduler.abort(id)
                answered = Finished(id, "abort", report=ended.report)
            else:
                (self._waiting_room if id in self._waiting_room else self._pause).leave(id)
                answered = Finished(id, "abort")
            failed = Failed(id, EngineUnavailable.code, ABORTED)
            self._emit([failed if record.pooling else answered])

    def _begin_update(self, message: UpdateWeights) -> Reading[ReadWeights]:
        if self._weights is None:
            raise WeightsError("this engine has no weights that could be updated")
        if self._update is not None:
            raise WeightsError("weights are being updated already: wait for that answer, and send this again")
        if len(message.version) > MAX_VERSION:
            raise WeightsError(f"a weight version has at most {MAX_VERSION} characters; got {len(message.version)}")
        self._sleep.wake()
        return self._weights.begin(Path(message.path).expanduser())

    def _exchange_ready(self, message: UpdateWeights, reading: Reading[ReadWeights]) -> None:
        """Exchanges weights that were read, once no step is in flight. If there is nothing to compute, it waits a
        little."""
        if not self._computing:
            reading.wait(PATIENCE)
        if not reading.ready:
            return
        self._update = None
        while self._in_flight:
            self._commit(*self._in_flight.popleft())
        try:
            update, self._classifier, self._dense = reading.result()
        except PenstockError as error:
            self._emit([Failed(message.id, error.code, error.message)])
            return
        self._sleep.wake()  # it may sleep again since the weights were asked for
        update.exchange()
        self._change_version(message)
        self._answer(message.id)

    def _change_version(self, message: UpdateWeights) -> None:
        """Notes which weights are loaded now, and that KV of the old ones is not theirs."""
        updates = message.number or self._weight_state.updates + 1
        version = message.version or str(updates)
        state = self._weight_state = WeightState(0, version, message.path, updates)
        if self._ledger is not None:
            self._ledger.freeze()
        sequences = self._scheduler.sequences
        for id, sequence in sequences.items():
            self._records[id].change_weights(sequence, state, message.recompute)
        salts = {id: self._records[id].salt(state) for id in sequences}
        change_salts(self._scheduler, salts, message.recompute)
