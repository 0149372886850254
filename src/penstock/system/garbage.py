"""Pauses Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class Pauses:
    """Counts the pauses that are under way in all threads: the collector goes on when the last one ends."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0
        self._collected = False  # before the first of them

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
    """Lets garbage lie: to look for it takes time where many objects are made that stay, and to free some of it at the
    wrong moment ends what is under way. Several threads may ask for that at once."""
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()
