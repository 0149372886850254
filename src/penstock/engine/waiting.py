"""Keeps requests that need something before they can run, such as a compiled grammar or an adapter, while others
run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from penstock.engine.request_record import RequestRecord

PATIENCE = 0.002  # seconds between two looks at the inbox, when all requests wait for something


class Pending(Protocol):
    """Is being prepared elsewhere."""

    @property
    def begun(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    def wait(self, seconds: float) -> None: ...


class Need(NamedTuple):
    """Names one thing that a request waits for."""

    reason: str  # as the request's report calls it
    pending: Pending
    deliver: Callable[[], None]  # gives it to the request, once it is ready; raises PenstockError if it has failed


class Waiting(NamedTuple):
    """Says which request waits for what, one after the other, and since when."""

    record: RequestRecord
    needs: tuple[Need, ...]
    since: float


class WaitingRoom:
    """Holds the requests that wait, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def worked_on(self) -> list[int]:
        return [id for id, waiting in self._waiting.items() if waiting.needs[0].pending.begun]

    def enter(self, record: RequestRecord, needs: Sequence[Need], now: float) -> None:
        self._waiting[record.request.id] = Waiting(record, tuple(needs), now)

    def drops(self, id: int) -> bool:
        return self._waiting.pop(id, None) is not None

    def wait(self, seconds: float) -> None:
        next(iter(self._waiting.values())).needs[0].pending.wait(seconds)

    def take_ready(self, now: float) -> Iterator[tuple[RequestRecord, tuple[Need, ...]]]:
        """Yields the requests whose first need is ready, with all their needs, and notes in their records how long they
        have waited for it."""
        for record, needs, since in list(self._waiting.values()):
            if needs[0].pending.ready:
                del self._waiting[record.request.id]
                record.waited[needs[0].reason] = now - since
                yield record, needs
