"""Loads a model at low priority, so that it does not slow down the streams of other models."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from penstock.config import log_to_stderr

NICE = 18  # the loader gets 2 % of a busy processor's time, and all idle time
LONGEST = 30.0  # seconds that work yields
AUTOGROUP = Path("/proc/self/autogroup")
TRIES = 50
PAUSE = 0.1  # seconds: the kernel lets autogroups be changed no more often
T = TypeVar("T")


def run_yielding(work: Callable[[], T]) -> T:
    """Returns the result of the work, or re-raises its error. The work runs in a thread of low priority, and so do the
    threads that it starts: a thread that has lowered its priority may not raise it again, but it can end. After a while
    the priority is raised again, if the system allows: a model must be loaded some time."""
    if sys.platform != "linux":
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        set_nice(threading.get_native_id(), NICE)
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="penstock-loading")
    with _yielding_session():
        thread.start()
        thread.join(LONGEST)
    if thread.is_alive():
        set_nice(thread.native_id or 0, 0)
        thread.join()
    if errors:
        raise errors[0]
    return results[0]


def set_nice(id: int, nice: int) -> None:
    """Sets the priority of a thread, which is a process to Linux; to raise it may not be allowed."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, id, nice)


@contextmanager
def _yielding_session() -> Iterator[None]:
    """Lowers the priority of this process's session, which counts instead of a thread's where the kernel divides
    processors among sessions first. An engine process has a session of its own."""
    lowered = os.getsid(0) == os.getpid() and _set_session(NICE, tries=1)
    try:
        yield
    finally:
        if lowered and not _set_session(0, TRIES):
            log_to_stderr("the engine keeps its low priority: its session's cannot be set", "warning")


def _set_session(nice: int, tries: int) -> bool:
    for left in reversed(range(tries)):
        try:
            AUTOGROUP.write_text(str(nice))
            return True
        except OSError as error:
            if error.errno != errno.EAGAIN or not left:
                return False
            time.sleep(PAUSE)
    return False
