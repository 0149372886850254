"""Records what an engine is doing in memory that outlives its process: the last plans, steps in flight, and how long it
may be silent. Processes that share the memory see that the engine hangs, and its work when it died."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection
from itertools import chain
from math import inf
from mmap import mmap
from typing import NamedTuple

from penstock.types import STEP_SIZES, StepPlan

PLANS = 8  # the latest, which are kept
ROWS = 1024  # kept per plan
WAITING = 64  # requests in the waiting room that are kept
ROW = 4  # numbers of a row: seq, start, count, sample
PLAN = 2 + ROW * ROWS  # numbers of a plan: step, rows, and its rows
BEAT, LIMIT, TAKEN, COMMITTED, ADDING, PLANNED, ROOM, URGENT, COMPILING = range(9)  # places of numbers of 8 bytes
WAITING_AT = 9
SIZES = len(STEP_SIZES) + 1
TIMES_AT = WAITING_AT + WAITING
HEADER = TIMES_AT + SIZES
NUMBERS = HEADER + PLANS * PLAN
RECORD_BYTES = 8 * NUMBERS
NOTHING = -1  # no request
ANSWERED = 2  # steps with tokens of its answer after which a request is unlikely to end the engine

LEAST = 2.0  # seconds that an engine may take for anything
SLOW = 60.0  # seconds allowed for other work, or for a step unlike all before it
LOADING = 60.0  # seconds that an engine which loads its model may give no sign of life
TIMES = 20  # a step takes no longer than this many times what such a step has taken
MICRO = 1_000_000
Memory = bytearray | mmap


class StepTimes:
    """Learns how long steps take, by the number of their tokens. It may begin with what the engine before has learned;
    with `slow_first`, a step of a size that this engine has not had yet may be slow nevertheless."""

    def __init__(self, micros: memoryview[int], slow_first: bool) -> None:
        self._micros = micros  # running means; 0: there was no such step yet
        self._seen = [not slow_first] * SIZES

    def observe(self, tokens: int, seconds: float) -> None:
        size = bisect_left(STEP_SIZES, tokens)
        known, taken = self._micros[size], max(int(seconds * MICRO), 1)
        self._micros[size] = known + (taken - known) // 8 if known and self._seen[size] else taken
        self._seen[size] = True

    def limit(self, tokens: int) -> float:
        """Returns the seconds after which a step of `tokens` tokens counts as hanging. An unseen size is compared with
        the next smaller seen one, or with the next larger one."""
        size = bisect_left(STEP_SIZES, tokens)
        known = [at for at in (*range(size, -1, -1), *range(size + 1, SIZES)) if self._micros[at]]
        if not known or not self._seen[size]:
            return SLOW
        larger = tokens / STEP_SIZES[known[0]] if known[0] < size else 1.0
        return max(TIMES * int(self._micros[known[0]]) / MICRO * larger, LEAST)


def _numbers(memory: Memory) -> memoryview[int]:
    return memoryview(memory).cast("q")


class FlightRecorder:
    """Writes to memory of RECORD_BYTES. Every change of what the engine does is a beat."""

    def __init__(self, memory: Memory | None = None, *, slow_first: bool = False) -> None:
        self.write_to(bytearray(RECORD_BYTES) if memory is None else memory, slow_first)
        self._ended = 0  # the last step that has ended
        self._longest_slice = 0.0  # seconds
        self._step_limit = SLOW  # seconds that the step may be silent which compiles a kernel

    def write_to(self, memory: Memory, slow_first: bool = False) -> None:
        """Records in other memory from now on. With `slow_first`, the first step of each size may be slow."""
        self._numbers = _numbers(memory)
        self._numbers[ADDING] = NOTHING
        self._times = StepTimes(self._numbers[TIMES_AT:HEADER], slow_first)

    def _beat(self, limit: float, urgent: float = 0.0) -> None:
        """Notes how long it may be silent, and how long (if that is not the same) while a message waits for it."""
        self._numbers[URGENT] = int((urgent or limit) * MICRO)
        self._numbers[LIMIT] = int(limit * MICRO)
        self._numbers[COMPILING] = False
        self._numbers[BEAT] += 1

    def wait(self) -> None:
        self._beat(0, LEAST)

    def prepare(self) -> None:
        """Notes that a moment without requests is used for a slice of other work. Once a request waits, that may take
        20 times as long as others have, as a step may."""
        known = max(TIMES * self._longest_slice, LEAST) if self._longest_slice else SLOW
        self._beat(SLOW, min(known, SLOW))

    def prepared(self, seconds: float) -> None:
        self._longest_slice = max(self._longest_slice, seconds)

    def work(self, slow: bool = False) -> None:
        self._beat(SLOW if slow else LEAST)

    def compile(self, begins: bool) -> None:
        if begins:
            self._step_limit = self._numbers[LIMIT] / MICRO
        self._beat(SLOW if begins else self._step_limit)
        self._numbers[COMPILING] = begins

    def load(self) -> None:
        self._beat(LOADING)

    def take(self, messages: int) -> None:
        self._numbers[TAKEN] += messages

    def add(self, id: int = NOTHING) -> None:
        self._numbers[ADDING] = id

    def hold(self, ids: Collection[int]) -> None:
        kept = array("q", list(ids)[:WAITING])
        self._numbers[ROOM] = len(kept)
        self._numbers[WAITING_AT : WAITING_AT + len(kept)] = kept

    def launch(self, plan: StepPlan) -> None:
        rows = [(row.seq, row.start, row.count, row.sample) for row in plan.rows[:ROWS]]
        flat = array("q", (plan.step, len(rows), *chain.from_iterable(rows)))
        numbers = self._numbers
        at = HEADER + numbers[PLANNED] % PLANS * PLAN
        numbers[at : at + len(flat)] = flat
        numbers[PLANNED] += 1
        self._beat(self._times.limit(sum(row.count for row in plan.rows)))

    def commit(self, plan: StepPlan, seconds: float) -> None:
        """Notes that the oldest step in flight has ended, and how long it took. Its rows are worked on until `sent`."""
        self._ended = plan.step
        if seconds:
            self._times.observe(sum(row.count for row in plan.rows), seconds)
        self._beat(LEAST)

    def sent(self) -> None:
        """Notes that the answers of the steps that have ended were sent: nothing more is done for their rows."""
        self._numbers[COMMITTED] = self._ended


class FlightRow(NamedTuple):
    """Is a row of a recorded plan."""

    seq: int
    start: int
    count: int  # type: ignore[assignment]  # as in types.Row
    sample: int


class FlightRecord(NamedTuple):
    """Holds the recorded work of an engine."""

    beat: int = 0
    limit: float = 0.0  # seconds that it may be silent; 0: for ever, unless a message waits for it
    taken: int = 0  # messages
    committed: int = 0  # the last step whose answers were sent
    adding: int = NOTHING  # the request that is being added
    waiting: tuple[int, ...] = ()  # requests in the waiting room
    plans: tuple[tuple[int, tuple[FlightRow, ...]], ...] = ()  # the last steps, in order, with their rows
    times: tuple[int, ...] = ()  # microseconds that steps take, by their size
    compiling: bool = False  # a kernel, for a step

    @property
    def suspects(self) -> set[int]:
        """Returns the requests that were being worked on: if the engine has died, one of them may be why. Those that it
        had answered are left out, unless it had answered all of them."""
        rows = (row.seq for step, rows in self.plans if step > self.committed for row in rows)
        ended = (row.seq for step, rows in self.plans if step <= self.committed for row in rows if row.sample)
        answered = {seq for seq, steps in Counter(ended).items() if steps >= ANSWERED}
        worked_on = {*rows, *self.waiting, self.adding} - {NOTHING}
        return worked_on - answered or worked_on


def write_times(memory: Memory, times: tuple[int, ...]) -> None:
    _numbers(memory)[TIMES_AT : TIMES_AT + len(times)] = array("q", times)


class Pulse(NamedTuple):
    """Holds the signs of life of an engine that may be running."""

    beat: int
    limit: float  # seconds that it may be silent; 0: for ever, unless a message waits for it
    urgent: float  # the same, while a message waits for it
    taken: int  # messages

    def allowed(self, sent: int) -> float:
        return self.urgent if self.taken < sent else self.limit or inf


def read_pulse(memory: Memory) -> Pulse:
    numbers = _numbers(memory)
    return Pulse(numbers[BEAT], numbers[LIMIT] / MICRO, numbers[URGENT] / MICRO or LEAST, numbers[TAKEN])


def read_record(memory: Memory) -> FlightRecord:
    numbers = _numbers(memory)
    planned = numbers[PLANNED]
    plans = []
    for number in range(max(planned - PLANS, 0), planned):
        at = HEADER + number % PLANS * PLAN
        step, count = numbers[at : at + 2]
        flat = numbers[at + 2 : at + 2 + ROW * count].tolist()
        plans.append((step, tuple(FlightRow(*flat[row : row + ROW]) for row in range(0, len(flat), ROW))))
    waiting = tuple(numbers[WAITING_AT : WAITING_AT + numbers[ROOM]].tolist())
    beat, limit, taken, committed, adding = numbers[:5].tolist()
    times, compiling = tuple(numbers[TIMES_AT:HEADER].tolist()), bool(numbers[COMPILING])
    return FlightRecord(beat, limit / MICRO, taken, committed, adding, waiting, tuple(plans), times, compiling)
