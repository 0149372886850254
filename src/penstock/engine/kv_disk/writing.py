"""Writes blocks to disk in a thread of low priority."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import NamedTuple

from penstock.engine.kv_disk.store import SegmentStore
from penstock.engine.low_priority import NICE, set_nice

QUEUED, FEW_QUEUED = 32, 4  # blocks that wait to be written: without and with states, which are large
LONGEST = 2.0  # seconds that closing waits for the disk


class BlockToWrite(NamedTuple):
    """Is a block with its contents, by part; None: a windowed group's block that is gone, or a state that is not
    there."""

    hash: bytes
    parent: bytes
    tokens: bytes
    contents: tuple[bytes | None, ...]


class Writer:
    """Writes blocks in the order in which they come."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._queue: Queue[BlockToWrite | None] = Queue(FEW_QUEUED if store.layout.state_bytes else QUEUED)
        self._thread: threading.Thread | None = None

    @property
    def full(self) -> bool:
        return self._queue.full()

    def write(self, block: BlockToWrite) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="penstock-kv-writing", daemon=True)
            self._thread.start()
        self._queue.put_nowait(block)

    def close(self) -> None:
        """Ends the thread once it has written the blocks it holds. It does not wait for a disk that hangs."""
        if self._thread is not None:
            with suppress(Full):
                self._queue.put(None, timeout=LONGEST)
                self._thread.join(LONGEST)

    def drop(self) -> None:
        with suppress(Empty):
            while True:
                self._queue.get_nowait()

    def _work(self) -> None:
        set_nice(threading.get_native_id(), NICE)
        while (block := self._queue.get()) is not None:
            self._store.append(*block)
