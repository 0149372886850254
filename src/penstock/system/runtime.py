"""Pauses Python's garbage collector, and starts threads with large stacks.

The stack size is a process-wide setting, so it is changed under a lock; concurrent changes could leave it large for all
later threads.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Pauses:
    """Counts active pauses in all threads: collection resumes after the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
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


_changing = threading.Lock()


@contextmanager
def large_stacks(size: int) -> Iterator[None]:
    """Gives threads started within the block a stack of `size` bytes."""
    with _changing:
        usual = threading.stack_size(size)
        try:
            yield
        finally:
            threading.stack_size(usual)


if hasattr(os, "register_at_fork"):  # a process forked meanwhile would inherit a locked lock
    os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_changing.release)
