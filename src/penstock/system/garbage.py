"""Pauses Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class Pauses:
    """Counts active pauses in all threads: collection resumes after the last one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0
        self._collected = False  # whether it was enabled before the first pause

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._collected = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._collected:
                gc.enable()


_pauses = Pauses()


@contextmanager
def no_collection() -> Iterator[None]:
    """Pauses garbage collection, which is slow while many permanent objects are created, and could close an object at a
    bad moment. Several threads may pause it at once.
    """
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()
