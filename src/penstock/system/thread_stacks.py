"""Starts threads with large stacks. The stack size is a process-wide setting, so it is changed under a lock; concurrent
changes could leave it large for all later threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
