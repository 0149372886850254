"""Notices in an engine process that the process which wanted it has ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress

STDIN = 0


def fork_parent() -> int:
    parent = multiprocessing.parent_process()
    assert parent is not None
    return int(parent.sentinel)


def until_ended(file: int) -> None:
    """Returns when the process at the other end of a pipe or socket has ended. If this process is stopped then, Linux
    continues it: a stopped process notices nothing, and would keep its memory for ever."""
    with suppress(ImportError, AttributeError, OSError):  # other systems have no such signals
        import fcntl

        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGCONT)
        fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_ASYNC)
    while os.read(file, 4096):
        pass
