"""Puts an engine to sleep: the device's memory is given back while the process stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.backend.base import Sleeper
from penstock.engine.feature import Feature
from penstock.engine.request_record import RequestRecord
from penstock.engine.waiting import Need
from penstock.errors import NotSupported, PenstockError
from penstock.types import Event, Failed, MemoryUse
from penstock.types.messages import Sleep, Wake


class Sleeping(Feature):
    """Sleeps once all requests have ended, and wakes up for the next one. Without a `sleeper` it refuses to sleep."""

    answers = (Sleep, Wake)

    def __init__(self, sleeper: Sleeper | None) -> None:
        self._sleeper = sleeper
        self._asked: list[int] = []  # messages that are answered when the engine sleeps
        self._host_bytes = 0  # host memory of the weights, kept when it is awake again

    @property
    def busy(self) -> bool:
        return bool(self._asked) and not self.engine.paused

    @property
    def slow(self) -> bool:
        return bool(self._asked) or self.engine.asleep

    def needs(self, record: RequestRecord) -> Sequence[Need]:
        self.wake()
        return ()

    def after_step(self) -> None:
        engine = self.engine
        if self._asked and not (engine.scheduler.sequences or engine.pipeline.in_flight or engine.waiting_room):
            self._fall_asleep()

    def answer(self, message: Any) -> Sequence[Event]:
        if isinstance(message, Wake):
            self.wake()
            asked, self._asked = [*self._asked, message.id], []  # a message that still waits for sleep has its answer
            return [MemoryUse(id, self.engine.limits.memory, self._host_bytes) for id in asked]
        if self._sleeper is None:
            raise NotSupported("this engine cannot sleep: its memory comes back when its process ends")
        self._asked.append(message.id)
        return ()

    def wake(self) -> None:
        """Takes the device's memory again, if it was given back; raises OutOfMemory if that is not possible now."""
        if self._sleeper is not None and self.engine.asleep:
            self._sleeper.wake()
            self.engine.asleep = False

    def _fall_asleep(self) -> None:
        asked, self._asked = self._asked, []
        self.engine.release_device()
        try:
            if self._sleeper is not None and not self.engine.asleep:
                self._host_bytes = self._sleeper.sleep()
                self.engine.asleep = True
        except PenstockError as error:
            self.engine.emit([Failed(id, error.code, error.message) for id in asked])
            return
        self.engine.emit([MemoryUse(id, 0, self._host_bytes) for id in asked])

    def hello(self) -> Mapping[str, Any]:
        return {"can_sleep": self._sleeper is not None}
