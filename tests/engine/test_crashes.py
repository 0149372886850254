"""Engine processes are killed, crash and hang: every answer goes on where it was, except that of a request which is the
reason, and the reason is found."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.backend.fake import continuation
from penstock.config import Config
from penstock.errors import EngineUnavailable
from penstock.ipc.engine_folder import EngineMemory
from penstock.ipc.launchers import SpawnLauncher
from penstock.ipc.spawn import ProcessClient
from penstock.ipc.trust import Trust
from penstock.types import Aborted, Event, Failed, Finished, Request, SamplingParams, Tokens
from penstock.types.messages import DescribeWeights, Pause, Resume
from tests.engine.test_ipc import LIMITS, VOCAB, events_of, run, started, tokens_of, until

# tokens that end the engine: of prompts, by a crash, a hang, a crash in the step after, SIGKILL, an error after the
# step and an error while the step is planned; of an answer
POISON, FREEZE, AFTER, KILLED, SETTLED, UNPLANNED, LATER = 666, 667, 668, 670, 671, 672, 669
COMPILES, COMPILES_ON = 673, 674  # the step takes longer than an engine may hang, and longer than a compiler may

HOST = f"""
import ctypes, os, signal, struct, sys, time
from penstock.backend.fake import FakeBackend
from penstock.engine import flight_recorder
from penstock.engine.assemble import assemble
from penstock.engine.feature import Feature
from penstock.engine.kv_handover.ledger import KvLedger, ledger_bytes
from penstock.ipc.host import host
from penstock.types import Limits

class Mortal(FakeBackend):
    doomed = False

    def launch(self, batch):
        if self.doomed:
            time.sleep(0.02)  # what was computed before is delivered
            ctypes.string_at(0)
        for token, at in zip(batch.tokens.tolist(), batch.positions.tolist()):
            if (token == {POISON} and at < 4) or (token == {LATER} and at > 30 and self.later):
                ctypes.string_at(0)
            if token == {KILLED} and at < 4:
                os.kill(os.getpid(), signal.SIGKILL)
            if token == {FREEZE} and at < 4:
                time.sleep(600)
            self.doomed |= token == {AFTER} and at < 4
            if token in ({COMPILES}, {COMPILES_ON}) and at < 4 and self.compiler:
                flight_recorder.SLOW = 600 if token == {COMPILES} else 1
                self.tell(True)
                time.sleep(flight_recorder.LEAST + 1)
                self.tell(False)
        return super().launch(batch)

    def tell_of_compiling(self, tell):
        self.tell = tell

    def wait(self, ticket):
        time.sleep(0.002)
        return super().wait(ticket)

class MortalLedger(KvLedger):
    def settle(self, running=(), late=0):
        if any({SETTLED} in seq.tokens[:4] and seq.computed > 2 for seq in running):
            raise struct.error("required argument is not an integer")

class Unplanned(Feature):
    def before_plan(self):
        if any({UNPLANNED} in seq.tokens[:4] for seq in self.engine.scheduler.sequences.values()):
            raise ValueError("no such block")

def open(config, _):
    backend = Mortal({VOCAB})
    backend.later = config.model == "later"
    backend.compiler = config.model == "compiles" or os.path.exists(config.model)
    if os.path.exists(config.model):
        os.remove(config.model)
    limits = Limits{tuple(LIMITS)}
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    ledger = MortalLedger(bytearray(ledger_bytes(limits)), limits)
    return assemble(backend, limits, sleeper=backend.sleeper, ledger=ledger, more=(Unplanned(),))

host(open)
"""
COUNT = 150

LOADING_HOST = f"""
import os, pathlib, signal, threading, time
from penstock.backend.fake import FakeBackend
from penstock.engine import flight_recorder
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.ipc import loading_pulse
from penstock.ipc.host import host
from penstock.types import Limits

flight_recorder.LOADING, loading_pulse.STALLED = 1.5, 0.5

def open(config, _):
    once = pathlib.Path(config.name)
    if once.exists():
        once.unlink()
        if config.model == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif config.model == "locked":
            threading.Event().wait()
        else:
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                sum(range(1000))
    backend, limits = FakeBackend({VOCAB}), Limits{tuple(LIMITS)}
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    return assemble(backend, limits)

host(open)
"""


def mortal(
    model: str = "fake", post_mortem: str = "off", pauses: tuple[float, ...] = (0.0, 0.01, 0.05)
) -> ProcessClient:
    config = Config(model=model, post_mortem=post_mortem)
    return ProcessClient(config, SpawnLauncher((sys.executable, "-c", HOST)), pauses)


def request(client: Any, prompt: list[int], max_tokens: int = COUNT) -> Request:
    return Request(client.next_id(), tuple(prompt), SamplingParams(), max_tokens)


def check_whole(events: list[Event], prompt: list[int], max_tokens: int = COUNT) -> None:
    """Checks that nothing is missing, nothing different and nothing there twice."""
    assert tokens_of(events) == continuation(prompt, max_tokens, VOCAB)
    *tokens, last = events
    assert all(isinstance(event, Tokens) for event in tokens)
    assert isinstance(last, Finished)
    assert last.reason == "length"
    assert last.report is not None
    assert {event.cached for event in tokens} == {last.report.cached}


def trying(client: Any) -> bool:
    """Returns whether a request is tried that may be why an engine died: another death then would be its fault."""
    return any(stream.trust is Trust.DOUBTED for stream in client._streams._streams.values())


async def kill_after_tokens(client: Any, kind: signal.Signals) -> int:
    """Sends a signal to the engine once it has generated something; returns which process that was."""
    await until(lambda: client.state == "ready" and client.stats.generated_tokens > 20 and not trying(client))
    pid = client.hello.pid
    os.kill(pid, kind)
    await until(lambda: client.hello is not None and client.hello.pid != pid)
    return pid


async def until_answered(client: Any, count: int) -> None:
    """Waits until so many requests have several tokens each: what a dying engine says last may be lost."""
    await until(lambda: client.stats.generated_tokens > 10 * count)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_every_answer_goes_on_where_it_was(kind: signal.Signals) -> None:
    async def scenario() -> None:
        async with started(mortal()) as client:
            random = Random(5)
            prompts = [[random.randrange(600) for _ in range(random.randrange(4, 90))] for _ in range(24)]  # 16 run
            asking = [asyncio.create_task(events_of(client, request(client, prompt))) for prompt in prompts]
            for _ in range(1 if kind is signal.SIGSTOP else 3):
                await kill_after_tokens(client, kind)
            for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
                check_whole(answer, prompt)
                report = answer[-1].report
                waits = dict(report.waited)
            assert waits["restart"] > 0
            assert client.in_flight == 0

    run(scenario())


def test_requests_that_come_while_there_is_no_engine_wait_for_the_next() -> None:
    async def scenario() -> None:
        async with started(mortal()) as client:
            os.kill(client.hello.pid, signal.SIGKILL)
            await until(lambda: client.state == "resuming")
            assert client.hello is not None
            with pytest.raises(EngineUnavailable, match="a new one is being started"):
                await client.ask(DescribeWeights())
            check_whole(await events_of(client, request(client, [1, 2])), [1, 2])
            assert (client.state, client.restarts) == ("ready", 1)

    run(scenario())


@pytest.mark.parametrize("token", [POISON, FREEZE, SETTLED])
def test_a_poisoned_request_fails_alone_after_two_deaths(token: int) -> None:
    async def scenario() -> None:
        async with started(mortal()) as client:
            prompts = [[seed, 2, 3] for seed in range(12)]
            asking = [asyncio.create_task(events_of(client, request(client, prompt, 400))) for prompt in prompts]
            await until_answered(client, len(prompts))
            poisoned = await events_of(client, request(client, [1, 2, token]))
            assert [type(event) for event in poisoned] == [Failed]
            assert poisoned[0].code == "poisoned_request"
            assert client.restarts <= 2
            await until(lambda: client.state == "ready")
            for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
                check_whole(answer, prompt, 400)
            (again,) = await events_of(client, request(client, [1, 2, token]))
            assert again.code == "poisoned_request"
            assert "refused at once" in again.message
            assert client.restarts == 2

    run(scenario())


def test_an_engine_that_compiles_is_not_killed() -> None:
    async def scenario() -> None:
        async with started(mortal("compiles")) as client:
            other = asyncio.create_task(events_of(client, request(client, [9], 400)))
            await until_answered(client, 1)
            check_whole(await events_of(client, request(client, [1, 2, COMPILES])), [1, 2, COMPILES])
            check_whole(await other, [9], 400)
            assert client.restarts == 0

    run(scenario())


def test_a_request_is_not_blamed_for_a_compiler_that_hangs(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "once").touch()
        async with started(mortal(str(tmp_path / "once"))) as client:
            stream = asyncio.create_task(events_of(client, request(client, [1, 2, COMPILES_ON])))
            await until(lambda: client.restarts == 1)
            assert not any(each.trust is Trust.DOUBTED or each.blame for each in client._streams._streams.values())
            check_whole(await stream, [1, 2, COMPILES_ON])

    run(scenario())


def test_a_request_that_cannot_be_planned_fails_alone() -> None:
    """The flight record names no request when the engine dies: no step has begun."""

    async def scenario() -> None:
        async with started(mortal()) as client:
            prompts = [[seed, 2, 3] for seed in range(6)]
            asking = [asyncio.create_task(events_of(client, request(client, prompt, 400))) for prompt in prompts]
            await until_answered(client, len(prompts))
            (poisoned,) = await events_of(client, request(client, [1, 2, UNPLANNED]))
            assert poisoned.code == "poisoned_request"
            for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
                check_whole(answer, prompt, 400)
            assert client.restarts <= 5

    run(scenario())


def test_a_request_is_blamed_half_as_much_for_deaths_that_come_from_outside() -> None:
    """The system kills the largest process when memory is short, whatever that computes."""

    async def scenario() -> None:
        async with started(mortal()) as client:
            (poisoned,) = await events_of(client, request(client, [1, 2, KILLED]))
            assert poisoned.code == "poisoned_request"
            await until(lambda: client.state == "ready")
            assert client.restarts == 4

    run(scenario())


def test_a_request_that_ends_each_engine_after_its_first_token_fails_alone() -> None:
    async def scenario() -> None:
        async with started(mortal()) as client:
            prompts = [[seed, 2, 3] for seed in range(6)]
            asking = [asyncio.create_task(events_of(client, request(client, prompt, 400))) for prompt in prompts]
            await until_answered(client, len(prompts))
            poisoned = await events_of(client, request(client, [1, 2, AFTER]))
            assert isinstance(poisoned[-1], Failed)
            assert poisoned[-1].code == "poisoned_request"
            for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
                check_whole(answer, prompt, 400)
            assert client.restarts <= 3

    run(scenario())


def test_of_many_new_requests_only_the_poisoned_one_fails() -> None:
    async def scenario() -> None:
        async with started(mortal()) as client:
            prompts = [[seed, 2, 3] + [POISON] * (seed == 7) for seed in range(14)]
            answers = await asyncio.gather(*(events_of(client, request(client, prompt)) for prompt in prompts))
            for seed, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                if seed == 7:
                    assert [type(event) for event in answer] == [Failed]
                else:
                    check_whole(answer, prompt)
            assert client.restarts <= 3

    run(scenario())


def test_a_request_that_is_poisoned_by_its_answer_fails_alone() -> None:
    def deadly(seed: int) -> bool:
        return LATER in continuation([seed, 2, 3], COUNT - 1, VOCAB)[30:]

    async def scenario() -> None:
        async with started(mortal("later")) as client:
            seeds = [seed for seed in range(100) if not deadly(seed)][:9] + list(filter(deadly, range(100)))[:1]
            answers = await asyncio.gather(*(events_of(client, request(client, [seed, 2, 3])) for seed in seeds))
            for seed, answer in zip(seeds[:-1], answers, strict=False):
                check_whole(answer, [seed, 2, 3])
            assert isinstance(answers[-1][-1], Failed)
            assert len(answers[-1]) > 20
            assert client.restarts <= 6

    run(scenario())


def test_what_was_aborted_or_left_is_not_resumed() -> None:
    async def scenario() -> None:
        async with started(mortal()) as client:
            reader = asyncio.create_task(events_of(client, request(client, [1], 5000)))
            left = asyncio.create_task(events_of(client, request(client, [2], 5000)))
            stays = asyncio.create_task(events_of(client, request(client, [3], COUNT)))
            await until(lambda: client.stats.running == 3)
            os.kill(client.hello.pid, signal.SIGKILL)
            await until(lambda: client.state == "resuming")
            client.abort(1)
            left.cancel()
            assert isinstance((await reader)[-1], Aborted)
            check_whole(await stays, [3])
            assert client.stats.generated_tokens <= COUNT

    run(scenario())


def test_control_messages_fail_and_pauses_are_told_again() -> None:
    async def scenario() -> None:
        async with started(mortal()) as client:
            assert (await client.ask(Pause())).paused
            os.kill(client.hello.pid, signal.SIGKILL)
            await until(lambda: client.restarts == 1 and client.state == "ready")
            assert (await client.ask(DescribeWeights())).paused
            asking = asyncio.create_task(events_of(client, request(client, [1, 2])))
            await asyncio.sleep(2.5)  # a pause is no hang
            assert client.restarts == 1
            await client.ask(Resume())
            check_whole(await asking, [1, 2])

    run(scenario())


def loading(model: str, once: Path) -> ProcessClient:
    """Returns a client whose engine hangs or takes long while it loads, if the file is there, which it removes."""
    config = Config(model=model, name=str(once), post_mortem="off")
    return ProcessClient(config, SpawnLauncher((sys.executable, "-c", LOADING_HOST)), (0.0, 0.0))


@pytest.mark.parametrize("model", ["stopped", "slow"])
def test_an_engine_that_stops_while_it_loads_is_killed_and_a_slow_one_is_left_alone(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with started(loading(model, tmp_path / "once")) as client:
            (tmp_path / "once").touch()
            os.kill(client.hello.pid, signal.SIGKILL)
            check_whole(await events_of(client, request(client, [1, 2], 5)), [1, 2], 5)

    run(check())
    assert not (tmp_path / "once").exists()
    assert ("while it loaded" in caplog.text) == (model == "stopped")


def test_an_engine_that_waits_for_ever_while_it_loads_fails_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "once").touch()
    with pytest.raises(EngineUnavailable, match=r"did not go on for .* and was killed before it was ready"):
        run(loading("locked", tmp_path / "once").start())
    assert " in open\n" in caplog.records[-1].detail  # where it hangs


def test_memory_of_a_flight_record_is_given_back_once(tmp_path: Path) -> None:
    """Two may end an engine at once. The second must not close a file that has the same number by then."""
    flight = EngineMemory(f"ipc://{tmp_path}/engine", "flight", 4096)
    flight.close()
    other = os.open(tmp_path, os.O_RDONLY)
    flight.close()
    os.fstat(other)
    os.close(other)
