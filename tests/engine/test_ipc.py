"""Both clients over the fake backend: the same answers, aborts that free blocks, and an engine process that may die."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import __version__
from penstock.backend.fake import FakeBackend, continuation
from penstock.config import Config
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.engine.feature import Feature
from penstock.errors import ConfigError, EngineUnavailable, MalformedFile, PenstockError, error_of
from penstock.ipc import process, wire
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.launchers import SpawnLauncher
from penstock.ipc.spawn import ProcessClient
from penstock.types import (
    Aborted,
    AdapterInfo,
    Event,
    Failed,
    Finished,
    Hello,
    Limits,
    Nearest,
    Report,
    Request,
    SamplingParams,
    Stats,
    TokenLogprob,
    Tokens,
)
from penstock.types.messages import Abort, Add, Close, FlushCache, Message

VOCAB = 1000
LIMITS = Limits(max_len=2**15, max_rows=16, step_tokens=64, block_size=16, num_blocks=2**13, vocab=VOCAB)
ENDLESS = 30_000  # tokens: no test waits for so many
WAIT = 120.0  # seconds after which something hangs

FAKE_HOST = f"""
import os, sys, time
import penstock.ipc.inprocess_engine
from penstock.backend.fake import FakeBackend
from penstock.engine.assemble import assemble
from penstock.errors import MalformedFile
from penstock.ipc.host import host
from penstock.types import Aborted, Limits

class SlowBackend(FakeBackend):
    def wait(self, ticket):
        time.sleep(0.002)
        return super().wait(ticket)

def open(config, _):
    if config.model == "broken":
        raise MalformedFile("the model is broken: fetch it again")
    if config.model == "crash" or (config.model.startswith("once:") and os.path.exists(config.model[5:])):
        sys.exit(7)
    if config.model.startswith("once:"):
        os.mkdir(config.model[5:])
    backend = SlowBackend({VOCAB})
    limits = Limits{tuple(LIMITS)}
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    engine = assemble(backend, limits, sleeper=backend.sleeper)
    if config.model == "old":
        penstock.ipc.inprocess_engine.__version__ = "0"
    if config.model == "junk":
        engine.step = lambda: [Aborted("no number")]
    return engine

host(open)
"""


def fake_engine(*more: Feature) -> Engine:
    backend = FakeBackend(VOCAB)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return assemble(backend, LIMITS, sleeper=backend.sleeper, more=more)


def in_process() -> InProcessClient:
    return InProcessClient(fake_engine, "fake")


def in_its_own(model: str = "fake", pauses: tuple[float, ...] = (0.01, 0.01)) -> ProcessClient:
    return ProcessClient(
        Config(model=model, post_mortem="off"), SpawnLauncher((sys.executable, "-c", FAKE_HOST)), pauses
    )


@asynccontextmanager
async def started(client: Any) -> Any:
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, WAIT))


async def until(met: Callable[[], bool]) -> None:
    while not met():
        await asyncio.sleep(0.005)


def request(client: Any, prompt: list[int], max_tokens: int = 20) -> Request:
    return Request(client.next_id(), tuple(prompt), SamplingParams(), max_tokens)


async def events_of(client: Any, asked: Request) -> list[Event]:
    return [event async for events in client.submit(asked) for event in events]


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.tokens]


async def leave_after_first(client: Any, asked: Request) -> None:
    async with aclosing(client.submit(asked)) as steps:
        async for _ in steps:
            break


both = pytest.mark.parametrize("make", [in_process, in_its_own], ids=["thread", "process"])


# -- both clients ------------------------------------------------------------------------------------------------


@both
def test_answers_are_those_of_the_engine(make: Callable[[], Any]) -> None:
    async def scenario() -> None:
        async with started(make()) as client:
            assert client.hello.limits == LIMITS
            assert client.hello.model == "fake"
            prompts = [[seed, 2, 3] * seed for seed in range(1, 20)]
            answers = await asyncio.gather(*(events_of(client, request(client, prompt)) for prompt in prompts))
            for prompt, events in zip(prompts, answers, strict=True):
                assert tokens_of(events) == continuation(prompt, 20, VOCAB)
                assert events[-1].__class__ is Finished
                assert sum(not isinstance(event, Tokens) for event in events) == 1
            assert client.stats.generated_tokens == 20 * len(prompts)

    run(scenario())


@both
def test_leaving_frees_every_block_and_disturbs_no_other(make: Callable[[], Any]) -> None:
    async def scenario() -> None:
        async with started(make()) as client:
            stay = [asyncio.create_task(events_of(client, request(client, [7, seed], 60))) for seed in range(8)]
            await asyncio.gather(*(leave_after_first(client, request(client, [9, seed], ENDLESS)) for seed in range(8)))
            for seed, answer in enumerate(stay):
                assert tokens_of(await answer) == continuation([7, seed], 60, VOCAB)
            await until(lambda: client.stats.running == client.stats.waiting == 0)
            assert client.stats.blocks_used == 0

    run(scenario())


@both
def test_cancelling_the_reader_aborts_the_request(make: Callable[[], Any]) -> None:
    async def scenario() -> None:
        async with started(make()) as client:
            reader = asyncio.create_task(events_of(client, request(client, [1], ENDLESS)))
            await until(lambda: client.stats.running == 1)
            reader.cancel()
            await until(lambda: client.stats.running == 0)
            assert client.stats.blocks_used == 0
            assert client.stats.generated_tokens < ENDLESS

    run(scenario())


@both
def test_what_cannot_fit_fails_with_its_code(make: Callable[[], Any]) -> None:
    async def scenario() -> None:
        async with started(make()) as client:
            (failed,) = await events_of(client, request(client, [1, 2, 3], LIMITS.max_len))
            assert failed.code == "context_length_exceeded"
            assert str(LIMITS.max_len) in failed.message
            assert tokens_of(await events_of(client, request(client, [4]))) == continuation([4], 20, VOCAB)

    run(scenario())


@both
def test_closing_ends_what_is_under_way_and_refuses_what_comes(make: Callable[[], Any]) -> None:
    async def scenario() -> None:
        client = make()
        await client.start()
        assert await client.start() == client.hello
        reader = asyncio.create_task(events_of(client, request(client, [1], ENDLESS)))
        await until(lambda: client.stats.running == 1)
        await client.close()
        assert (await reader)[-1].__class__ is Failed
        with pytest.raises(EngineUnavailable):
            client.submit(request(client, [1]))

    run(scenario())


@both
def test_not_started_is_unavailable(make: Callable[[], Any]) -> None:
    client = make()
    with pytest.raises(EngineUnavailable, match="not been started"):
        client.submit(request(client, [1]))


# -- the thread --------------------------------------------------------------------------------------------------


def test_thread_start_raises_what_opening_raised() -> None:
    def refuse() -> Engine:
        raise ConfigError("too small")

    async def scenario() -> None:
        client = InProcessClient(refuse)
        with pytest.raises(ConfigError, match="too small"):
            await client.start()
        await client.close()

    run(scenario())


def test_thread_that_fails_fails_its_requests() -> None:
    class Broken(Feature):
        def before_plan(self) -> None:
            raise ValueError("lost the thread")

    async def scenario() -> None:
        async with started(InProcessClient(lambda: fake_engine(Broken()))) as client:
            (failed,) = await events_of(client, request(client, [1]))
            assert failed.code == "engine_died"
            assert "lost the thread" in failed.message
            assert client.hello is None

    run(scenario())


# -- the process -------------------------------------------------------------------------------------------------


def test_start_up_errors_keep_their_name_and_text() -> None:
    async def scenario() -> None:
        with pytest.raises(MalformedFile, match=r"^the model is broken: fetch it again$"):
            await in_its_own("broken").start()
        with pytest.raises(EngineUnavailable, match="exited with code 7 before it was ready"):
            await in_its_own("crash").start()
        with pytest.raises(EngineUnavailable, match=f"is not of version {__version__}"):
            await in_its_own("old").start()
        missing = ProcessClient(Config(model="x"), SpawnLauncher(("/nonexistent/python",)))
        with pytest.raises(EngineUnavailable, match="could not be started"):
            await missing.start()

    run(scenario())


def test_an_engine_that_cannot_be_restarted_fails_its_requests_and_is_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(in_its_own(f"once:{tmp_path}/first")) as client:
            reader = asyncio.create_task(events_of(client, request(client, [1], ENDLESS)))
            await until(lambda: client.stats.running == 1)
            os.kill(client.hello.pid, signal.SIGKILL)
            failed = (await reader)[-1]
            assert failed.code == "engine_died"
            assert "failed 3 times in a row, it is tried again every 0.01 s" in failed.message
            assert client.state == "failed"
            with pytest.raises(EngineUnavailable, match=r"times in a row, .* exited with code 7"):
                client.submit(request(client, [1]))
            (tmp_path / "first").rmdir()  # now it can start again
            await until(lambda: client.state == "ready")
            assert tokens_of(await events_of(client, request(client, [5]))) == continuation([5], 20, VOCAB)

    run(scenario())


def test_an_engine_that_talks_nonsense_is_ended() -> None:
    async def scenario() -> None:
        async with started(in_its_own("junk", ())) as client:
            (failed,) = await events_of(client, request(client, [1]))
            assert failed.code == "engine_died"
            assert "SIGKILL, and is given up" in failed.message
            assert client.state == "failed"

    run(scenario())


def test_an_interrupt_does_not_reach_the_engine_and_closing_ends_it() -> None:
    async def scenario() -> None:
        async with started(in_its_own()) as client:
            pid = client.hello.pid
            os.kill(pid, signal.SIGINT)
            assert tokens_of(await events_of(client, request(client, [5]))) == continuation([5], 20, VOCAB)
            assert client.hello.pid == pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(scenario())


def test_the_engine_leaves_with_its_parent(tmp_path: Path) -> None:
    """The parent is a process that starts an engine and is killed: the engine must go by itself, and tidy up."""
    parent = f"""
import asyncio, sys
from penstock.config import Config
from penstock.ipc.launchers import SpawnLauncher
from penstock.ipc.spawn import ProcessClient

async def main():
    client = ProcessClient(Config(model="fake"), SpawnLauncher((sys.executable, "-c", {FAKE_HOST!r})))
    print((await client.start()).pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""

    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            parent,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        assert process.stdout is not None
        engine = int(await process.stdout.readline())
        assert list(tmp_path.iterdir())
        process.kill()
        await process.wait()
        await until(lambda: not alive(engine))
        assert not list(tmp_path.iterdir())

    run(scenario())


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def scenario() -> None:
        async with started(in_its_own()):
            (folder,) = tmp_path.iterdir()
            assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(MalformedFile):
            await in_its_own("broken").start()
        assert not list(tmp_path.iterdir())

    run(scenario())


def test_what_keeps_an_engine_from_starting_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    monkeypatch.setattr(process, "bind", refuse)

    async def scenario() -> None:
        with pytest.raises(EngineUnavailable, match=r"could not be started: .* too many open files"):
            await in_its_own().start()

    run(scenario())
    assert not list(tmp_path.iterdir())


# -- the wire ----------------------------------------------------------------------------------------------------

EVENTS: list[Event] = [
    Tokens(1, (5, 6), (TokenLogprob(5, -0.5, ((5, -0.5), (9, -1.25))), TokenLogprob(6, -2.0)), cached=32),
    Tokens(2, (), scores=(TokenLogprob(3, -1.0),)),
    Finished(1, "stop", 6),
    Finished(4, "length", None, b"", Report(2, 0.5, nearest=Nearest(1, 5, 3, (7,), (8, 9), (4,)))),
    Aborted(3),
    Aborted(5, Report()),
    Failed(2, "step_failed", "no"),
]


@pytest.mark.parametrize(
    "message",
    [
        Add(
            Request(
                2**40,
                (1, 2, 3),
                SamplingParams(temperature=0.5, logit_bias={7: -1.5}, seed=-(2**63), stop=("a", "b"), logprobs=3),
                10,
                frozenset({1, 2}),
                3,
                "tenant",
                "",
                "owner",
                True,
            )
        ),
        Abort(0),
        Abort(7),
        FlushCache(),
        Close(),
    ],
)
def test_messages_survive_the_wire(message: Message) -> None:
    assert wire.decode_message(wire.encode_message(message)) == message


def test_a_step_survives_the_wire_events_of_a_kind_together() -> None:
    stats = Stats(running=3, busy_seconds=0.25)
    arrived = wire.decode_answer(wire.encode_answer(wire.step(EVENTS, stats)))
    assert isinstance(arrived, wire.Step)
    assert list(arrived.events()) == EVENTS
    assert arrived.stats == stats


def test_hello_and_refusal_survive_the_wire() -> None:
    adapter = AdapterInfo("a", "/a", 0.5, 16)
    for answer in (
        wire.Ready(Hello("1", 2, "m", LIMITS, (adapter,), ("x",), draft_tokens=4)),
        wire.Refused("config_error", "why"),
    ):
        assert wire.decode_answer(wire.encode_answer(answer)) == answer


def test_errors_come_back_as_they_were() -> None:
    error = error_of("malformed_file", "text")
    assert type(error) is MalformedFile
    assert (error.code, error.message) == ("malformed_file", "text")
    unknown = error_of("from_the_future", "text")
    assert type(unknown) is PenstockError
    assert unknown.code == "from_the_future"


def test_an_engine_process_logs_as_its_server_does() -> None:
    program = """
import logging, os
from penstock.config import log_to_stderr
from penstock.ipc.host_log import log_as_the_server
log_as_the_server()
log_to_stderr("loaded\\nwell")
logging.getLogger("penstock.engine").warning("slow")
"""
    for format in ("text", "json"):
        environment = os.environ | {"PENSTOCK_LOG_FORMAT": format}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=WAIT, check=True
        )
        lines = done.stderr.splitlines()
        if format == "text":
            assert lines == ["loaded", "well", "slow"]
        else:
            told = [json.loads(line) for line in lines]
            assert [(line["level"], line["message"]) for line in told] == [
                ("info", "loaded\nwell"),
                ("warning", "slow"),
            ]
            assert all(line["time"].endswith("Z") for line in told)
