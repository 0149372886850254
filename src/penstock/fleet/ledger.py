"""Keeps the load of each replica: its last report, plus the requests sent since."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from itertools import islice
from typing import NamedTuple

KV_PER_QUEUED = 16  # tokens in the KV cache that weigh as much as one queued token when replicas are ordered


class Load(NamedTuple):
    """The work of a replica. Times are milliseconds of the owner's clock."""

    queued: int = 0  # prompt tokens that are neither cached nor in a step yet
    pending: int = 0  # uncached tokens of all prompts that have no first token yet
    rows: int = 0  # requests that are answering
    kv_tokens: int = 0  # tokens of the KV cache that running and waiting requests need
    busy_until: float = 0.0  # when the present step should end, if it computes prompts
    waiting: int = 0  # requests that it has not begun
    background: int = 0  # background requests
    background_tokens: int = 0  # queued tokens of background requests

    def plus(self, other: Load) -> Load:
        return Load(
            self.queued + other.queued,
            self.pending + other.pending,
            self.rows + other.rows,
            self.kv_tokens + other.kv_tokens,
            max(self.busy_until, other.busy_until),
            self.waiting + other.waiting,
            self.background + other.background,
            self.background_tokens + other.background_tokens,
        )

    @property
    def is_idle(self) -> bool:
        return not self.rows and not self.waiting


def load_of(uncached: int, tokens: int, background: bool = False) -> Load:
    return Load(uncached, uncached, 0, tokens, 0.0, 1, int(background), uncached if background else 0)


class Ledger:
    """Orders replicas by load. A report includes the requests received so far; later ones are added."""

    def __init__(self) -> None:
        self._reported: dict[int, Load] = {}
        self._unseen: dict[int, deque[Load]] = {}  # sent, and not in the last report
        self._received: dict[int, int] = {}  # requests that the last report knows of
        self._loads: dict[int, Load] = {}
        self._order: list[tuple[int, int]] = []  # weight, replica; sorted

    def __len__(self) -> int:
        return len(self._loads)

    def join(self, replica: int) -> None:
        """Adds a replica that owes nothing. One that is known starts again."""
        self.leave(replica)
        self._reported[replica] = Load()
        self._unseen[replica] = deque()
        self._received[replica] = 0
        self._loads[replica] = Load()
        insort(self._order, (0, replica))

    def leave(self, replica: int) -> None:
        if replica in self._loads:
            self._unorder(replica)
            del self._reported[replica], self._unseen[replica], self._received[replica], self._loads[replica]

    def sent(self, replica: int, load: Load) -> None:
        self._unseen[replica].append(load)
        self._set(replica, self._loads[replica].plus(load))

    def report(self, replica: int, load: Load, received: int) -> None:
        """Takes a replica's load after it has received `received` requests. Older reports are ignored."""
        newly = received - self._received[replica]
        if newly < 0:
            return
        unseen = self._unseen[replica]
        for _ in range(min(newly, len(unseen))):
            unseen.popleft()
        self._received[replica], self._reported[replica] = received, load
        for late in unseen:
            load = load.plus(late)
        self._set(replica, load)

    def knows(self, replica: int) -> bool:
        return replica in self._loads

    def load(self, replica: int) -> Load:
        return self._loads[replica]

    def replicas(self) -> list[int]:
        return [replica for _, replica in self._order]

    def least(self, count: int) -> list[int]:
        return [replica for _, replica in islice(self._order, count)]

    def _set(self, replica: int, load: Load) -> None:
        old = self._loads[replica]
        self._loads[replica] = load
        weight = _weight(load)
        if weight != _weight(old):
            del self._order[bisect_left(self._order, (_weight(old), replica))]
            insort(self._order, (weight, replica))

    def _unorder(self, replica: int) -> None:
        del self._order[bisect_left(self._order, (_weight(self._loads[replica]), replica))]


def _weight(load: Load) -> int:
    return load.queued * KV_PER_QUEUED + load.kv_tokens
