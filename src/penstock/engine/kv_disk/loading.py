"""Reads blocks from disk in threads while steps run, and gives up where computing them is sooner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from penstock.engine.kv_disk.store import SegmentStore, StoredBlock

THREADS = 2  # checking blocks takes longer than reading them
LEARNED = 0.3  # weight of the latest rate
FORGIVEN = 1.02  # factor of the rate, with each chain that was not read because of it
PATIENCE = 0.05  # share of the compute time before reading is judged
LONGEST = 1.0  # seconds that closing waits for the disk
LEAST = 0.01  # seconds that are waited in any case

Compute = Callable[[int], float]  # returns the seconds to compute all but this number of blocks
Targets = Sequence[memoryview | None]  # where a block is read to, by layer group
B = TypeVar("B")
B_contra = TypeVar("B_contra", contravariant=True)


class ChainReader(Protocol[B_contra]):
    """Reads blocks from where they are."""

    def read(self, block: B_contra, targets: Targets) -> bool:
        """Reads the contents of a block into memory; returns whether they are what they should be."""


class Loading(Generic[B]):
    """Is a chain of blocks that is being read: see Pending. It counts as ready once all are read, one cannot be, or to
    compute the rest is sooner than to read it by the rate of those that are. So many `threads` read it. It
    is given the share `patience` of the time that computing takes before it is judged."""

    def __init__(
        self,
        blocks: Sequence[B],
        targets: Sequence[Targets],
        compute: Compute,
        *,
        threads: int = 0,
        patience: float = PATIENCE,
    ) -> None:
        self.began = time.perf_counter()
        self.given_up = False
        self.waiters = 1  # requests
        self._blocks = blocks
        self._targets = targets
        self._compute = compute
        self._turns = count()
        self._read = bytearray(len(blocks))
        self._failed = len(blocks)  # the first block that cannot be used
        self._started = self._ended = 0.0
        self._left = threads or THREADS
        self._patience = patience
        self._done = threading.Event()
        self._lock = threading.Lock()

    @property
    def begun(self) -> bool:
        return self._started > 0

    @property
    def finished(self) -> bool:
        return self._done.is_set()

    @property
    def ready(self) -> bool:
        """Returns whether waiting longer is not worth it. If all blocks are read, it does not wait for a thread that is
        busy with an earlier chain."""
        complete = self.finished or self.whole
        if not (complete or self.given_up):
            self.given_up = self._too_slow(time.perf_counter() - self.began)
        return complete or self.given_up

    @property
    def usable(self) -> int:
        end = self._read.find(0)
        return len(self._read) if end < 0 else end

    @property
    def whole(self) -> bool:
        return self.usable == len(self._blocks)

    @property
    def seconds(self) -> float:
        return (self._ended or time.perf_counter()) - (self._started or self.began)

    def wait(self, seconds: float) -> None:
        self._done.wait(seconds)

    def run(self, source: ChainReader[B]) -> None:
        """Reads blocks in turn with other threads, each from the next one on, in one of its threads."""
        self._started = self._started or time.perf_counter()
        try:
            for at in self._turns:
                if at >= self._failed or self.given_up:
                    break
                if source.read(self._blocks[at], self._targets[at]):
                    self._read[at] = 1
                else:
                    self._failed = min(self._failed, at)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._ended = time.perf_counter()
                self._done.set()

    def _too_slow(self, elapsed: float) -> bool:
        """Returns whether to compute the rest is sooner than to read it. At first nobody can tell."""
        if elapsed <= LEAST + self._patience * self._compute(0):
            return False
        usable = self.usable
        return not usable or elapsed / usable * (len(self._blocks) - usable) > LEAST + self._compute(usable)


class Loader:
    """Reads chains of blocks, one after the other, and learns how fast that is."""

    def __init__(self, store: SegmentStore, rate: float = 0.0) -> None:
        self.rate = rate  # bytes in a second; 0: nothing was read yet
        self._store = store
        self._queues: list[SimpleQueue[Loading[StoredBlock] | None]] = []
        self._threads: list[threading.Thread] = []

    def seconds(self, size: int) -> float:
        return size / self.rate if self.rate else 0.0

    def load(self, loading: Loading[StoredBlock]) -> None:
        self.start()
        for queue in self._queues:
            queue.put(loading)

    def observe(self, size: int, seconds: float) -> None:
        self.rate += (LEARNED if self.rate else 1.0) * (size / seconds - self.rate)

    def forgive(self) -> None:
        """Trusts the disk a little more after nothing was read from it because it was slow, so that it is tried
        again."""
        self.rate *= FORGIVEN

    def close(self) -> None:
        """Ends the threads after the reads that have begun. It does not wait for a disk that hangs."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(LONGEST)

    def start(self) -> None:
        """Starts the threads, if none are running: the first chain need not wait for that."""
        if self._threads:
            return
        self._queues = [SimpleQueue() for _ in range(THREADS)]
        for queue in self._queues:
            thread = threading.Thread(target=self._work, args=[queue], name="penstock-kv-reading", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self, queue: SimpleQueue[Loading[StoredBlock] | None]) -> None:
        while (loading := queue.get()) is not None:
            loading.run(self._store)
