"""Keeps whether an engine sleeps, and who has asked for that."""

from __future__ import annotations

from penstock.backend.base import Sleeper
from penstock.errors import NotSupported


class SleepState:
    """Uses a backend's sleeper, if it has one, and remembers what it was used for last."""

    def __init__(self, sleeper: Sleeper | None) -> None:
        self._sleeper = sleeper
        self.asked: list[int] = []  # ids of messages that are answered when it sleeps
        self.asleep = False
        self.host_bytes = 0  # that its weights take in host memory; they stay taken when it is awake again

    @property
    def possible(self) -> bool:
        return self._sleeper is not None

    def ask(self, id: int) -> None:
        """Notes that a message asks for sleep; raises NotSupported where there is none."""
        if self._sleeper is None:
            raise NotSupported("this engine cannot sleep: its memory comes back when its process ends")
        self.asked.append(id)

    def sleep(self) -> None:
        """Gives the device's memory back, unless it is given back already."""
        if self._sleeper is not None and not self.asleep:
            self.host_bytes = self._sleeper.sleep()
            self.asleep = True

    def wake(self) -> None:
        """Takes the device's memory again, if it was given back."""
        if self._sleeper is not None and self.asleep:
            self._sleeper.wake()
            self.asleep = False
