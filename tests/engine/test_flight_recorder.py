"""An engine says for how long it may be silent: by what its steps have taken, and less while somebody waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from math import inf

import pytest

from penstock.backend.fake import FakeBackend
from penstock.config import Config
from penstock.engine.assemble import assemble
from penstock.engine.flight_recorder import (
    HEADER,
    LEAST,
    RECORD_BYTES,
    SIZES,
    SLOW,
    TIMES,
    TIMES_AT,
    FlightRecorder,
    StepTimes,
    read_pulse,
    read_record,
    write_times,
)
from penstock.engine.loop import advance
from penstock.ipc.launchers import SpawnLauncher
from penstock.ipc.spawn import ProcessClient
from penstock.types import STEP_SIZES, Failed, Request, Row, SamplingParams, StepPlan
from penstock.types.messages import Add
from tests.engine.test_crashes import check_whole, request
from tests.engine.test_ipc import LIMITS, VOCAB, events_of, run, started, until

PREPARING_HOST = f"""
import time
from penstock.backend.fake import FakeBackend
from penstock.engine.assemble import assemble
from penstock.ipc.host import host
from penstock.types import Limits

class Prepares(FakeBackend):
    def prepare_in_idle(self):
        time.sleep(0.02)  # there is always more to do
        return True

def open(config, _):
    backend, limits = Prepares({VOCAB}), Limits{tuple(LIMITS)}
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    return assemble(backend, limits)

host(open)
"""


def times(slow_first: bool = False, inherited: tuple[int, ...] = ()) -> StepTimes:
    memory = bytearray(RECORD_BYTES)
    write_times(memory, inherited)
    return StepTimes(memoryview(memory).cast("q")[TIMES_AT:HEADER], slow_first)


def step(tokens: int) -> StepPlan:
    return StepPlan(1, (Row(1, 0, tokens, 1, 0),))


def test_a_step_may_take_twenty_times_as_long_as_such_steps_have() -> None:
    learned = times()
    assert learned.limit(1) == SLOW  # nothing is known
    learned.observe(1, 0.5)
    assert learned.limit(1) == TIMES * 0.5
    learned.observe(1, 0.001)
    assert learned.limit(1) == pytest.approx(TIMES * (0.5 - 0.499 / 8))  # a running mean


def test_a_fast_step_may_take_two_seconds() -> None:
    learned = times()
    learned.observe(1, 0.001)
    assert learned.limit(1) == LEAST


def test_a_size_that_was_not_seen_is_judged_by_the_next_smaller_one_or_the_next_larger() -> None:
    learned = times()
    learned.observe(STEP_SIZES[0], 1.0)
    assert learned.limit(8 * STEP_SIZES[0]) == TIMES * 8.0  # in proportion
    learned = times()
    learned.observe(STEP_SIZES[3], 1.0)
    assert learned.limit(STEP_SIZES[0]) == TIMES * 1.0
    assert learned.limit(STEP_SIZES[-1] + 1) == pytest.approx(TIMES * (STEP_SIZES[-1] + 1) / STEP_SIZES[3])


def test_a_device_may_be_slow_at_each_size_once() -> None:
    learned = times(slow_first=True)
    learned.observe(1, 30.0)  # it has compiled
    assert learned.limit(STEP_SIZES[2]) == SLOW
    assert learned.limit(1) == TIMES * 30.0
    learned.observe(1, 1.0)
    assert learned.limit(1) < TIMES * 30.0


@pytest.mark.parametrize("slow_first", [False, True])
def test_what_the_engine_before_has_learned_counts(slow_first: bool) -> None:
    before = [0] * SIZES
    before[0] = 400_000
    inherited = times(slow_first, tuple(before))
    assert inherited.limit(1) == (SLOW if slow_first else TIMES * 0.4)
    inherited.observe(1, 0.2)
    assert inherited.limit(1) == pytest.approx(TIMES * (0.2 if slow_first else 0.375))


def test_a_record_hands_down_its_times() -> None:
    memory = bytearray(RECORD_BYTES)
    recorder = FlightRecorder(memory)
    recorder.launch(step(3))
    recorder.commit(step(3), 0.25)
    learned = read_record(memory).times
    assert [micros for micros in learned if micros] == [250_000]
    again = bytearray(RECORD_BYTES)
    write_times(again, learned)
    FlightRecorder(again).launch(step(3))
    assert read_pulse(again).limit == TIMES * 0.25


def test_suspects_are_those_that_were_not_answered_unless_all_were() -> None:
    memory = bytearray(RECORD_BYTES)
    recorder = FlightRecorder(memory)
    answering, new, later = Row(1, 8, 1, 1), Row(2, 0, 4, 1), Row(3, 0, 4, 0)
    for step, rows in enumerate([(answering, new), (answering, later), (answering, new, later)], 1):
        plan = StepPlan(step, rows, (), ())
        recorder.launch(plan)
        if step == 3:
            assert read_record(memory).suspects == {2, 3}  # 1 has had two tokens
        recorder.commit(plan, 0.1)
        if step == 3:
            assert read_record(memory).suspects == {2, 3}  # what is done with its answers may be why
        recorder.sent()
    recorder.launch(StepPlan(4, (answering,), (), ()))
    assert read_record(memory).suspects == {1}


def test_a_request_that_was_refused_is_suspected_of_nothing() -> None:
    memory, backend = bytearray(RECORD_BYTES), FakeBackend(VOCAB)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    engine = assemble(backend, LIMITS)
    engine.record_flight(memory)
    (refused,) = advance(engine, [Add(Request(7, (VOCAB,), SamplingParams(), 10))])
    assert isinstance(refused, Failed)
    assert read_record(memory).suspects == set()


def test_a_step_that_compiles_has_a_minute_until_it_goes_on() -> None:
    memory = bytearray(RECORD_BYTES)
    recorder = FlightRecorder(memory)
    recorder.launch(step(1))
    recorder.commit(step(1), 0.01)
    recorder.launch(step(1))
    assert (read_pulse(memory).limit, read_record(memory).compiling) == (LEAST, False)
    recorder.compile(True)
    assert (read_pulse(memory).limit, read_record(memory).compiling) == (SLOW, True)
    recorder.compile(False)
    assert (read_pulse(memory).limit, read_record(memory).compiling) == (LEAST, False)
    recorder.compile(True)  # it fails, and the step with it
    recorder.work()
    assert (read_pulse(memory).limit, read_record(memory).compiling) == (LEAST, False)


def test_who_waits_shortens_what_idle_work_may_take() -> None:
    memory = bytearray(RECORD_BYTES)
    recorder = FlightRecorder(memory)
    recorder.wait()
    assert (read_pulse(memory).allowed(0), read_pulse(memory).allowed(1)) == (inf, LEAST)
    recorder.prepare()
    assert read_pulse(memory).allowed(1) == SLOW  # nobody knows yet how long that takes
    for seconds, allowed in ((0.01, LEAST), (0.5, TIMES * 0.5), (0.01, TIMES * 0.5), (9.0, SLOW)):
        recorder.prepared(seconds)
        recorder.prepare()
        assert (read_pulse(memory).allowed(0), read_pulse(memory).allowed(1)) == (SLOW, allowed)
    recorder.launch(step(1))
    assert read_pulse(memory).allowed(0) == read_pulse(memory).allowed(1) == SLOW
    recorder.take(1)
    recorder.wait()
    assert read_pulse(memory).allowed(1) == inf


def test_an_engine_that_stops_while_it_prepares_is_noticed_when_a_request_waits() -> None:
    """Fails if the limit is that of idle work, by which it would be noticed after a minute."""

    async def scenario() -> None:
        config = Config(model="fake", post_mortem="off")
        async with started(
            ProcessClient(config, SpawnLauncher((sys.executable, "-c", PREPARING_HOST)), (0.0,))
        ) as client:
            flight = client._engine._link.flight
            first = read_pulse(flight).beat
            await until(lambda: read_pulse(flight).beat > first + 2)
            os.kill(client.hello.pid, signal.SIGSTOP)
            async with asyncio.timeout(SLOW / 2):
                check_whole(await events_of(client, request(client, [1, 2], 5)), [1, 2], 5)
            assert client.restarts == 1

    run(scenario())
