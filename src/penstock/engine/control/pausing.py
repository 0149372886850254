"""Pausing an engine: no step is computed, and requests that arrive wait for the end of the pause."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from penstock.core import Sequence as TokenSequence
from penstock.engine.control.sleeping import Sleeping
from penstock.engine.feature import Feature
from penstock.engine.request_record import RequestRecord
from penstock.errors import EngineUnavailable, PenstockError
from penstock.types import PAUSE_ABORT, PAUSE_WAIT, Event, Failed, Finished
from penstock.types.messages import AbortAll, Pause, Resume

ABORTED = "all requests were aborted before this one was answered: send it again"


class Pausing(Feature):
    """Is in one of three states: no pause; a pause that waits for requests to end (they drain); a pause."""

    answers = (Pause, Resume, AbortAll)

    def __init__(self) -> None:
        self._draining: set[int] = set()  # requests that may still run before the pause begins
        self._held: dict[int, tuple[RequestRecord, float]] = {}  # id -> record, start of the wait
        self._asked: list[int] = []  # messages that are answered when the pause has begun

    @property
    def waiting(self) -> int:
        return len(self._held)

    def holds(self, record: RequestRecord, sequence: TokenSequence) -> bool:
        if not (self.engine.paused or self._draining) or record.request.id in self._draining:
            return False
        self.engine.scheduler.check(sequence)
        self._held[record.request.id] = record, self.engine.scheduler.now
        return True

    def drops(self, id: int) -> bool:
        return self._held.pop(id, None) is not None

    def after_step(self) -> None:
        """Begins a pause when the last draining request has ended, and answers messages when nothing is in flight."""
        if self._draining:
            self._draining &= self.engine.records.keys()
            self.engine.paused = not self._draining
        if self._asked and not (self._draining or self.engine.pipeline.in_flight):
            asked, self._asked = self._asked, []
            self.engine.emit([self.engine.weight_state(id) for id in asked])

    def answer(self, message: Any) -> Sequence[Event]:
        if isinstance(message, Pause):
            if message.mode == PAUSE_ABORT:
                self._abort_all()
            running = self.engine.records if message.mode == PAUSE_WAIT else ()
            self._draining = {id for id in running if id not in self._held}
            self.engine.paused = not self._draining
            self._asked.append(message.id)
            return ()
        if isinstance(message, Resume):
            self._resume()
        if isinstance(message, AbortAll):
            self._abort_all()
        return [self.engine.weight_state(message.id)]

    def _resume(self) -> None:
        """Ends the pause and starts the requests that waited. They need the device's memory; raises OutOfMemory, and
        leaves the pause as it is, if the memory cannot be had now."""
        if self._held:
            self.engine.find(Sleeping).wake()
        held, self._held = self._held, {}
        self.engine.paused, self._draining = False, set()
        now = time.perf_counter()
        for record, since in held.values():
            record.waited["pause"] = record.waited.get("pause", 0.0) + now - since
            try:
                self.engine.start(record)
            except PenstockError as error:
                self.engine.emit([Failed(record.request.id, error.code, error.message)])

    def _abort_all(self) -> None:
        """Ends all requests with the tokens that they have so far. Requests without partial answers, such as
        embeddings, fail."""
        scheduler = self.engine.scheduler
        scheduler.now = time.perf_counter()
        for id, record in list(self.engine.records.items()):
            if id in scheduler.sequences:
                (ended,) = scheduler.abort(id)
                answered = Finished(id, "abort", report=ended.report)
            else:
                self.engine.drop(id)
                answered = Finished(id, "abort")
            failed = Failed(id, EngineUnavailable.code, ABORTED)
            self.engine.emit([failed if record.pooling else answered])
