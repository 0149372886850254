"""Measures for how long an engine process gives no sign of life though it could: time in which its threads waited for a
processor or a disk does not count, nor does time in which this process itself stood still."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

from penstock.engine.flight_recorder import LEAST, SLOW

log = logging.getLogger(__name__)

TICK = 0.1  # seconds between two looks at an engine's pulse
SLOW_SHARE = 0.25  # share of the allowed silence after which the engine is logged as slow
SLOWEST_USUAL = 1.0  # seconds of silence without a word in the log
NANO = 1e-9
RUNNABLE, WAITS_FOR_DISK, STOPPED = "R", "D", "T"  # states of a thread
STATE, FAULTS = 0, 9  # places of the state and the major page faults in a thread's stat, behind its name


class ThreadTimes(NamedTuple):
    """The system's counts of a thread."""

    state: str
    ran: float  # seconds on a processor
    waited: float  # seconds in which it was ready to run and had no processor
    faults: int  # waits for a page of memory from a disk


Threads = Mapping[int, ThreadTimes]


def read_threads(pid: int) -> Threads:
    """Returns the times of a process's threads, by their ids. There are none if the process has ended or the system has
    no such files."""
    found = {}
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError, ValueError, IndexError):  # a thread may end meanwhile
                ran, waited, _ = (thread / "schedstat").read_text().split()
                stat = (thread / "stat").read_text().rpartition(") ")[2].split()
                times = ThreadTimes(stat[STATE], int(ran) * NANO, int(waited) * NANO, int(stat[FAULTS]))
                found[int(thread.name)] = times
    return found


def own_work() -> float:
    """Returns a number of seconds that grows while this process runs, or this thread waits for a processor."""
    with suppress(OSError):
        return time.process_time() + int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * NANO
    return time.process_time()


class Silence:
    """Adds up the silence of the process `pid`, tick by tick. `read` returns the times of a process's threads, and
    `work` what `own_work` does."""

    def __init__(
        self, pid: int, read: Callable[[int], Threads] = read_threads, work: Callable[[], float] = own_work
    ) -> None:
        self.seconds = 0.0  # since the last beat
        self.stopped = False  # SIGSTOP
        self._pid = pid
        self._read = read
        self._work = work
        self._allowed = inf  # seconds
        self._beat, self._told = -1, False
        self._before: float | None = None  # when the pulse was read last
        self._disk = 0.0  # seconds that were forgiven since the last beat, for waits for a disk
        self._threads: Threads | None = None  # the engine's threads at the last pulse
        self._own = 0.0  # work of this process

    @property
    def too_long(self) -> bool:
        return self.seconds > self._allowed

    def observe(self, beat: int, allowed: float, now: float) -> None:
        """Takes the engine's beat, at this moment of a monotonic clock. The engine may be silent for `allowed` seconds,
        and if it is stopped for at most LEAST."""
        if beat != self._beat and self._told:
            log.info("the engine goes on, after %.1f s", self.seconds)
            self._told = False
        if beat == self._beat and allowed < inf and self._before is not None:
            self._add(now - self._before)
        else:
            self.seconds, self.stopped, self._disk, self._threads = 0.0, False, 0.0, None
        self._beat, self._before = beat, now
        self._allowed = min(allowed, LEAST) if self.stopped else allowed
        if not self._told and self.seconds > max(SLOW_SHARE * self._allowed, SLOWEST_USUAL):
            log.warning("the engine has not gone on for %.1f s; it is killed after %.1f s", self.seconds, self._allowed)
            self._told = True

    def _add(self, passed: float) -> None:
        """Adds what counts of the seconds since the last tick."""
        before, own_before = self._threads, self._own
        self._threads, self._own = self._read(self._pid), self._work()
        if before is None:
            self.seconds += min(passed, 2 * TICK)
            return
        awake = min(passed, 2 * TICK + self._own - own_before)
        states = {times.state for times in self._threads.values()}
        self.stopped = states == {STOPPED}
        self.seconds += max(awake - self._forgiven(_changes(before, self._threads), awake), 0.0)

    def _forgiven(self, changes: list[ThreadTimes], passed: float) -> float:
        """Returns for how many of the `passed` seconds the engine was unable to run."""
        starved = sum(change.waited for change in changes)
        if any(change.state == RUNNABLE and not change.ran + change.waited for change in changes):
            starved = passed  # the system counts a wait for a processor only when it has ended
        on_disk = any(change.state == WAITS_FOR_DISK or change.faults for change in changes)
        if on_disk and self._disk < SLOW:  # a disk that never answers is a hang
            self._disk += passed
            return passed
        return starved


def _changes(before: Threads, after: Threads) -> list[ThreadTimes]:
    zero = ThreadTimes("", 0.0, 0.0, 0)
    pairs = ((before.get(id, zero), times) for id, times in after.items())
    return [
        ThreadTimes(now.state, now.ran - old.ran, now.waited - old.waited, now.faults - old.faults)
        for old, now in pairs
    ]
