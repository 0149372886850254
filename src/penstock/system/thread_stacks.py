"""Starts threads with large stacks. How large stacks are is set for a whole process, so that is changed under a lock:
two who changed it at once would leave it large for all threads that come later."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_changing = threading.Lock()


@contextmanager
def large_stacks(size: int) -> Iterator[None]:
    """Gives the threads that are started within a stack of `size` bytes of addresses."""
    with _changing:
        usual = threading.stack_size(size)
        try:
            yield
        finally:
            threading.stack_size(usual)


if hasattr(os, "register_at_fork"):  # a process that is forked meanwhile would have a lock that nobody releases
    os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_changing.release)
