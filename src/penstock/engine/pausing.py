"""Keeps track of a pause: who may still run, who waits for its end, and who is to be told that it has begun."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.engine.record import RequestRecord


class PauseState:
    """Is in one of three states: no pause; a pause that waits for requests to end (`draining`); a pause."""

    def __init__(self) -> None:
        self.paused = False
        self.draining: set[int] = set()  # requests that may still run before the pause begins
        self._held: dict[int, tuple[RequestRecord, float]] = {}  # by id, with the time since when
        self._asked: list[int] = []

    def __len__(self) -> int:
        """Returns how many requests wait for the pause to end."""
        return len(self._held)

    def __contains__(self, id: int) -> bool:
        """Returns whether a request waits for the pause to end."""
        return id in self._held

    def begin(self, id: int, running: Iterable[int] = ()) -> None:
        """Begins a pause once those that are running have ended. Message `id` is answered then."""
        self.draining = {each for each in running if each not in self._held}
        self.paused = not self.draining
        self._asked.append(id)

    def note(self, records: Collection[int]) -> None:
        """Takes note of the requests that have not ended."""
        if self.draining:
            self.draining &= set(records)
            self.paused = not self.draining

    def take_asked(self) -> list[int]:
        """Returns the messages that can be answered, since the pause has begun or was called off."""
        if self.draining:
            return []
        asked, self._asked = self._asked, []
        return asked

    def stops(self, id: int) -> bool:
        """Returns whether a request that would start now must wait for the pause to end."""
        return (self.paused or bool(self.draining)) and id not in self.draining

    def hold(self, record: RequestRecord, now: float) -> None:
        """Lets a request wait for the pause to end."""
        self._held[record.request.id] = record, now

    def leave(self, id: int) -> None:
        """Lets a request go that does not wait any longer."""
        del self._held[id]

    def end(self, now: float) -> list[RequestRecord]:
        """Ends the pause; returns the requests that waited, with the time that they did."""
        held, self._held = self._held, {}
        self.paused, self.draining = False, set()
        for record, since in held.values():
            record.waited["pause"] = record.waited.get("pause", 0.0) + now - since
        return [record for record, _ in held.values()]
