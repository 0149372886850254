"""Shows that an engine process makes progress while it loads its model. The time for that depends on model, disk and
machine."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from penstock.engine.flight_recorder import FlightRecorder, Memory

BEAT_SECONDS = 0.25  # between two beats
STALLED = 300.0  # seconds without progress after which there are no more beats
PROGRESS = 0.001  # seconds of processor time that count as progress


class LoadingPulse:
    """Beats from a thread in a flight record, while its context lasts and the process gets on: it computes, reads from
    a disk, or its children have. A process that is stopped does not beat, and one that waits for ever soon does not."""

    def __init__(self, memory: Memory) -> None:
        self._recorder = FlightRecorder(memory)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="penstock-pulse", daemon=True)

    def _beat(self) -> None:
        done, changed = _work(), time.monotonic()
        while time.monotonic() - changed < STALLED:
            self._recorder.load()
            if self._ended.wait(BEAT_SECONDS):
                return
            if (now := _work()) - done > PROGRESS:
                done, changed = now, time.monotonic()

    def __enter__(self) -> Self:
        self._recorder.load()  # a process that stops before its thread has begun has beaten once
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()


def _work() -> float:
    """Returns a number that grows with the work of other threads of this process and its children: seconds of processor
    time, plus one for each read from a disk."""
    spent = time.process_time() - time.thread_time()
    try:
        import resource
    except ImportError:  # Windows counts the time of this process only
        return spent
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    reads = own.ru_majflt + own.ru_inblock + children.ru_inblock
    return spent + children.ru_utime + children.ru_stime + reads
