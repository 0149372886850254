"""An engine's silence counts only while it could go on: on a clock and on processors that the test makes up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.engine.flight_recorder import LEAST, SLOW
from penstock.ipc.silence import TICK, Silence, Threads, ThreadTimes, read_threads
from tests.engine.test_ipc import run, until

PID = 7


class Machine:
    """Counts what an engine's one thread, and the process that watches it, have done."""

    def __init__(self, on_linux: bool = True) -> None:
        self.now = self.ran = self.waited = self.own = 0.0
        self.faults, self.state = 0, "S"
        self.threads = on_linux
        self.silence = Silence(PID, self.read, lambda: self.own)

    def read(self, pid: int) -> Threads:
        assert pid == PID
        return {PID: ThreadTimes(self.state, self.ran, self.waited, self.faults)} if self.threads else {}

    def tick(self, seconds: float = TICK, *, ran: float = 0.0, waited: float = 0.0, allowed: float = LEAST) -> bool:
        """Lets a thread run and wait for so long of a tick; returns whether the engine hangs."""
        self.now += seconds
        self.ran += ran
        self.waited += waited
        self.silence.observe(1, allowed, self.now)
        return self.silence.too_long

    def until_killed(self, seconds: float = TICK, limit: float = 120.0, **thread: float) -> float:
        """Returns the seconds after which an engine is killed that goes on like this; infinity after the limit."""
        begun = self.now
        while self.now - begun < limit:
            if self.tick(seconds, **thread):
                return self.now - begun
        return float("inf")


@pytest.mark.parametrize(("what", "thread"), [("waits for a lock", {}), ("computes for ever", {"ran": TICK})])
def test_a_hang_is_seen_within_three_seconds(what: str, thread: dict[str, float]) -> None:
    machine = Machine()
    machine.state = "R" if thread else "S"
    assert LEAST < machine.until_killed(**thread) < 3.0, what


def test_an_engine_that_has_a_quarter_of_a_processor_is_given_four_times_as_long() -> None:
    machine = Machine()
    assert machine.until_killed(ran=TICK / 4, waited=3 * TICK / 4) == pytest.approx(4 * LEAST, rel=0.1)


def test_an_engine_that_gets_no_processor_is_not_killed() -> None:
    """The system counts a wait when it ends: until then, a thread is ready to run and nothing else changes."""
    machine = Machine()
    machine.state = "R"
    assert machine.until_killed() == float("inf")


def test_an_engine_whose_memory_comes_back_from_a_disk_is_given_a_minute() -> None:
    machine = Machine()
    machine.state = "D"
    assert SLOW < machine.until_killed() < SLOW + 3.0
    machine = Machine()
    for _ in range(int(SLOW / 2 / TICK)):
        machine.faults += 1
        assert not machine.tick()
    assert machine.until_killed() < 3.0


def test_a_stopped_engine_is_seen_whatever_it_was_allowed() -> None:
    machine = Machine()
    machine.state = "T"
    assert machine.until_killed(allowed=20.0) < 3.0
    assert machine.silence.stopped


def test_a_busy_machine_delays_nothing_where_it_is_known_why_this_process_is_late() -> None:
    machine = Machine()
    machine.tick()
    while not machine.tick(1.0):
        machine.own += 1.0  # it waited for a processor too
    assert machine.now < 3.5


def test_time_in_which_everything_stood_still_does_not_count() -> None:
    machine = Machine()
    machine.tick()
    assert not machine.tick(3600.0)
    assert machine.silence.seconds < 1.0


def test_without_such_counters_ticks_count() -> None:
    assert LEAST < Machine(on_linux=False).until_killed() < 3.0
    assert Machine(on_linux=False).until_killed(seconds=1.0) > 4 * LEAST


def test_a_beat_ends_a_silence_and_one_that_is_slow_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.ipc.silence")
    machine = Machine()
    for _ in range(50):
        machine.tick(allowed=10.2)
    machine.silence.observe(2, 10.2, machine.now + TICK)
    slow, again = caplog.messages
    assert slow == "the engine has not gone on for 2.6 s; it is killed after 10.2 s"
    assert again == "the engine goes on, after 4.9 s"
    assert machine.silence.seconds == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such files")
def test_what_the_system_counts_is_read() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    async def scenario() -> None:
        await until(lambda: any(times.ran > 0.01 for times in read_threads(process.pid).values()))
        os.kill(process.pid, 19)
        await until(lambda: {times.state for times in read_threads(process.pid).values()} == {"T"})

    try:
        run(scenario())
    finally:
        process.kill()
        process.wait()
    assert read_threads(process.pid) == {}
