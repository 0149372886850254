"""Whether the machine was ours while something was measured.

Engines suffer unequally from a neighbour (threads that wait for each other spin, and may collapse), so a figure taken
beside a compiler says little, and alternating does not mend it.
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
from typing import NamedTuple

TICK = os.sysconf("SC_CLK_TCK")
GLANCE = 0.5  # seconds
PR_SET_CHILD_SUBREAPER = 36


class Clock(NamedTuple):
    """Seconds of processor time: of all processes, or lost to other guests of the host; and of ours that have ended."""

    wall: float
    all: float
    ours: float

    @classmethod
    def now(cls) -> Clock:
        user, nice, system, _, _, irq, softirq, steal = (int(n) / TICK for n in _stat().split()[1:9])
        spent = os.times()
        ours = spent.user + spent.system + spent.children_user + spent.children_system
        return cls(time.perf_counter(), user + nice + system + irq + softirq + steal, ours)


def others_since(start: Clock) -> float:
    """The share of the machine's processors that others have had."""
    now = Clock.now()
    taken = (now.all - start.all) - (now.ours - start.ours)
    return max(0.0, taken / (now.wall - start.wall) / (os.cpu_count() or 1))


def adopt_orphans() -> None:
    """Makes processes whose parent ends ours, so that their time can be counted as ours."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans() -> None:
    """Counts the time of adopted processes as ours. All processes have been told to end."""
    with suppress(ChildProcessError):
        while True:
            os.wait()


def wait_for_quiet(share: float, patience: float) -> None:
    """Until others use less than `share` of the machine, or for `patience` seconds."""
    until = time.perf_counter() + patience
    while time.perf_counter() < until:
        start = Clock.now()
        time.sleep(GLANCE)
        if others_since(start) < share:
            return


def _stat() -> str:
    with open("/proc/stat") as file:
        return file.readline()
