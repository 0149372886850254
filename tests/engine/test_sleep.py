"""An engine that sleeps gives its memory back, forgets what it cached, and answers as before when it is woken."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from penstock.backend.fake import HOST_BYTES, FakeBackend, continuation
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.engine.loop import advance
from penstock.errors import NotSupported, OutOfMemory
from penstock.ipc import wire
from penstock.planning.memory_plan import all_states
from penstock.types import Event, Failed, Finished, Limits, MemoryUse, Request, SamplingParams
from penstock.types.messages import Add, ListAdapters, Pause, Resume, Sleep, Wake
from tests.engine.test_ipc import VOCAB, both, events_of, in_its_own, request, run, started, tokens_of, until

LIMITS = Limits(max_len=64, max_rows=4, step_tokens=16, block_size=4, num_blocks=64, vocab=100, memory=5000)
PROMPT = tuple(range(20, 40))


class FullSleeper:
    """Has no memory for either."""

    def sleep(self) -> int:
        raise OutOfMemory("the host is full")

    def wake(self) -> None:
        raise OutOfMemory("the device is full")


def made(sleeper: Any = None, states: int = 0) -> Engine:
    backend, limits = FakeBackend(LIMITS.vocab), LIMITS._replace(states=states)
    backend.reserve_kv(limits.num_blocks, limits.block_size, all_states(limits))
    return assemble(backend, limits, sleeper=sleeper or backend.sleeper)


def asked(id: int, max_tokens: int = 5) -> Add:
    return Add(Request(id, PROMPT, SamplingParams(temperature=0), max_tokens))


def drain(engine: Engine, *messages: Any) -> list[Event]:
    events = advance(engine, messages)
    while not engine.idle:
        events += engine.step()
    return events


@pytest.mark.parametrize("states", [0, 8])
def test_an_engine_that_slept_answers_as_before_from_an_empty_cache(states: int) -> None:
    engine = made(states=states)
    first = drain(engine, asked(1))
    assert drain(engine, Sleep(id=2)) == [MemoryUse(2, 0, HOST_BYTES)]
    assert engine.stats().blocks_cached == 0
    assert not engine.use_idle_moment(), "nothing touches the device meanwhile"
    assert drain(engine, Sleep(id=3)) == [MemoryUse(3, 0, HOST_BYTES)]
    assert drain(engine, Wake(id=4)) == [MemoryUse(4, LIMITS.memory, HOST_BYTES)]
    again = drain(engine, asked(5))
    assert tokens_of(again) == tokens_of(first) == continuation(PROMPT, 5, LIMITS.vocab, states > 0)
    end = again[-1]
    assert isinstance(end, Finished)
    assert end.report is not None
    assert end.report.cached == 0


def test_a_request_wakes_the_engine() -> None:
    engine = made()
    drain(engine, Sleep(id=1))
    assert tokens_of(drain(engine, asked(2))) == continuation(PROMPT, 5, LIMITS.vocab)
    assert drain(engine, Wake(id=3)) == [MemoryUse(3, LIMITS.memory, HOST_BYTES)]


def test_sleep_waits_for_the_answers_under_way() -> None:
    engine = made()
    events = drain(engine, asked(1, 30), asked(2, 9), Sleep(id=3))
    assert [event.seq for event in events if not hasattr(event, "tokens")] == [2, 1, 3]
    assert len(tokens_of(events)) == 39
    assert events[-1] == MemoryUse(3, 0, HOST_BYTES)


def test_waking_calls_off_a_sleep_that_has_not_begun() -> None:
    engine = made()
    events = drain(engine, asked(1, 9), Sleep(id=2), Wake(id=3))
    assert [event for event in events if isinstance(event, MemoryUse)] == [MemoryUse(id, 5000, 0) for id in (2, 3)]
    assert engine.use_idle_moment() is False
    assert tokens_of(drain(engine, asked(4))) == continuation(PROMPT, 5, LIMITS.vocab)


def test_a_shortage_of_memory_is_told_and_changes_nothing() -> None:
    engine = made(FullSleeper())
    assert drain(engine, Sleep(id=1)) == [Failed(1, OutOfMemory.code, "the host is full")]
    assert tokens_of(drain(engine, asked(2))) == continuation(PROMPT, 5, LIMITS.vocab)
    engine.asleep = True
    assert drain(engine, Wake(id=3)) == [Failed(3, OutOfMemory.code, "the device is full")]
    assert drain(engine, asked(4)) == [Failed(4, OutOfMemory.code, "the device is full")]


def test_an_engine_without_a_sleeper_says_so() -> None:
    backend = FakeBackend(LIMITS.vocab)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    engine = assemble(backend, LIMITS)
    assert not engine.hello()["can_sleep"]
    (failed,) = drain(engine, Sleep(id=1))
    assert isinstance(failed, Failed)
    assert failed.code == NotSupported.code


@both
def test_clients_put_their_engine_to_sleep_and_wake_it(make: Callable[[], Any]) -> None:
    async def scenario() -> None:
        async with started(make()) as client:
            assert client.hello.can_sleep
            prompt = list(range(50))
            answering = asyncio.create_task(events_of(client, request(client, prompt, 40)))
            await until(lambda: client.in_flight > 0 or answering.done())
            assert (await client.ask(Sleep()))[1:] == (0, HOST_BYTES)
            assert answering.done(), "it ended before the engine slept"
            assert client.stats.blocks_cached == 0
            assert (await client.ask(Wake())).host == HOST_BYTES
            again = await events_of(client, request(client, prompt, 40))
            assert tokens_of(again) == tokens_of(await answering) == continuation(prompt, 40, VOCAB)

    run(scenario())


def test_an_engine_that_died_asleep_sleeps_again() -> None:
    async def scenario() -> None:
        async with started(in_its_own()) as client:
            await client.ask(Sleep())
            os.kill(client.hello.pid, signal.SIGKILL)
            await until(lambda: client.restarts == 1)
            with pytest.raises(NotSupported):
                await client.ask(ListAdapters())  # once this is answered, all messages before are
            assert (await client.ask(Wake())).host == HOST_BYTES, "it slept before"
            assert tokens_of(await events_of(client, request(client, [1, 2]))) == continuation([1, 2], 20, VOCAB)

    run(scenario())


@pytest.mark.parametrize("message", [Sleep(id=2**40), Wake(id=0)])
def test_messages_about_sleep_survive_the_wire(message: Any) -> None:
    assert wire.decode_message(wire.encode_message(message)) == message


def test_a_request_that_a_pause_held_wakes_the_engine_when_the_pause_ends() -> None:
    engine = made()
    drain(engine, Pause(id=1))
    assert drain(engine, asked(2)) == [], "the pause holds it"
    assert drain(engine, Sleep(id=3)) == [MemoryUse(3, 0, HOST_BYTES)]
    assert tokens_of(drain(engine, Resume(id=4))) == continuation(PROMPT, 5, LIMITS.vocab)
