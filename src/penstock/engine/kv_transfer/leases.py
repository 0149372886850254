"""Keeps which blocks are offered to whom and until when, and refuses those who ask for anything else."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.engine.kv_transfer.staging import StagedBlocks, StagedCopy
from penstock.engine.kv_transfer.wire import EXPIRED, OTHER_EPOCH, OUT_OF_RANGE, UNKNOWN, USED, TransferRefused

ID = 16  # bytes
LONGEST = 60.0  # seconds of a lease
REMEMBERED = 4096  # offers that have ended, with the reason


class LeasedBlock(NamedTuple):
    """Is a block that is offered, and where it is staged."""

    hash: bytes
    parent: bytes
    tokens: bytes
    copies: tuple[StagedCopy, ...]  # one for each layer group
    of_state: bool = False  # it is a part of a recurrent state: see state_parts.py

    @property
    def places(self) -> tuple[int, ...]:
        """Returns where it is staged, by layer group; -1: not offered."""
        return tuple(copy.place for copy in self.copies)


class Lease(NamedTuple):
    """Keeps blocks in the staging memory until it ends."""

    blocks: Sequence[LeasedBlock]
    until: float  # on the clock of the leases


class Leases:
    """Grants leases and ends them. Any thread may use it. `now` is a clock in seconds."""

    def __init__(self, staging: StagedBlocks, epoch: int, now: Callable[[], float] = time.monotonic) -> None:
        self.epoch = epoch
        self.refused: Counter[str] = Counter()
        self.read = 0  # blocks
        self.staging = staging
        self._now = now
        self._granted: dict[bytes, Lease] = {}
        self._opened: dict[bytes, Lease] = {}
        self._ended: OrderedDict[bytes, str] = OrderedDict()  # id -> the reason to refuse it
        self._lock = threading.Lock()

    def grant(self, blocks: Sequence[LeasedBlock], seconds: float) -> bytes:
        """Grants one reader staged blocks for `seconds`; returns the id of the offer."""
        id = os.urandom(ID)
        with self._lock:
            self._granted[id] = Lease(blocks, self._now() + min(seconds, LONGEST))
        return id

    def open(self, id: bytes, epoch: int, first: int, count: int) -> Sequence[LeasedBlock]:
        """Returns blocks of an offer, counted from its first, to its reader; raises TransferRefused if that is not
        possible. An offer is opened once."""
        with self._lock:
            reason = self._reason(id, epoch, first, count)
            if reason:
                self.refused[reason] += 1
                raise TransferRefused(reason)
            lease = self._opened[id] = self._granted.pop(id)
        return lease.blocks[first : first + count]

    def end(self, id: bytes, read: int = 0) -> None:
        """Ends a lease of which `read` blocks were read. Ended leases are ignored."""
        with self._lock:
            self.read += read
            self._end(id, USED)

    def expire(self) -> None:
        """Ends the leases whose time is over, also while they are read: their readers will notice."""
        now = self._now()
        with self._lock:
            over = [id for held in (self._granted, self._opened) for id, lease in held.items() if lease.until <= now]
            for id in over:
                self._end(id, EXPIRED)

    def clear(self) -> None:
        with self._lock:
            for id in (*self._granted, *self._opened):
                self._end(id, EXPIRED)

    def _reason(self, id: bytes, epoch: int, first: int, count: int) -> str:
        if epoch != self.epoch:
            return OTHER_EPOCH
        if id in self._opened:
            return USED
        if (lease := self._granted.get(id)) is None:
            return self._ended.get(id, UNKNOWN)
        if lease.until <= self._now():
            return EXPIRED
        return "" if count and first + count <= len(lease.blocks) else OUT_OF_RANGE

    def _end(self, id: bytes, reason: str) -> None:
        lease = self._granted.pop(id, None) or self._opened.pop(id, None)
        if lease is None:
            return
        self.staging.give_back(place for block in lease.blocks for place in block.places if place >= 0)
        self._ended[id] = reason
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
