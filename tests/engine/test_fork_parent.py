"""The process that engines are forked from dies: engines go on, are still watched and killed, and the next ones are
forked from another process. Nothing that an engine leaves outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.ipc.launchers import ForkLauncher, SpawnLauncher
from penstock.ipc.spawn import ProcessClient
from penstock.types import Request, SamplingParams
from tests.engine.test_ipc import FAKE_HOST, events_of, run, started, tokens_of, until
from tests.engine.test_kept_kv import ANSWER, PROMPT, config

SERVER = """
import asyncio
from penstock.ipc.launchers import ForkLauncher, SpawnLauncher
from penstock.ipc.spawn import ProcessClient
from tests.engine.test_kept_kv import config

async def serve():
    client = ProcessClient(config(), {launcher}())
    await client.start()
    print(client.hello.pid, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(serve())
"""
FORKING, SPAWNING = SERVER.format(launcher="ForkLauncher"), SERVER.format(launcher="SpawnLauncher")


def state_of(pid: int) -> tuple[str, int]:
    """Returns a process's state and its parent; one that has ended is a zombie, whoever has to take note of that."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "Z", 0
    return state, int(parent)


def ended(pid: int) -> bool:
    return state_of(pid)[0] == "Z"


async def ask(client: ProcessClient) -> list[int]:
    request = Request(client.next_id(), PROMPT, SamplingParams(temperature=1.0, seed=5), ANSWER)
    return tokens_of(await events_of(client, request))


def test_an_engine_goes_on_without_its_fork_parent(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with started(ProcessClient(config(), ForkLauncher())) as client:
            engine = client.hello.pid
            said = await ask(client)
            parent = state_of(engine)[1]
            os.kill(parent, signal.SIGKILL)
            await until(lambda: ended(parent))
            assert await ask(client) == said
            assert (client.restarts, client.hello.pid, client.state) == (0, engine, "ready")
            for _ in range(2):  # nobody can tell how the first one ends
                os.kill(client.hello.pid, signal.SIGKILL)
                restarts = client.restarts
                await until(lambda: client.restarts > restarts and client.state == "ready")  # noqa: B023
                assert await ask(client) == said
            assert ended(engine)
            assert client.restarts == 2

    run(scenario())
    first, second = (line for line in caplog.messages if "wait for a new one" in line)
    assert "nobody knows its exit code" in first
    assert "was killed by SIGKILL" in second


def test_a_stopped_fork_parent_delays_no_restart() -> None:
    """It tells nobody how the engine ended, and forks none."""

    async def scenario() -> None:
        async with started(ProcessClient(config(), ForkLauncher())) as client:
            said = await ask(client)
            parent = state_of(client.hello.pid)[1]
            os.kill(parent, signal.SIGSTOP)
            os.kill(client.hello.pid, signal.SIGKILL)
            await until(lambda: client.restarts == 1 and client.state == "ready")
            assert await ask(client) == said
            assert ended(parent)

    run(scenario())


def test_an_engine_is_forked_although_the_fork_parent_is_stopped() -> None:
    async def scenario() -> None:
        launcher = ForkLauncher()
        async with started(ProcessClient(config(), launcher)) as client:
            parent = state_of(client.hello.pid)[1]
            os.kill(parent, signal.SIGSTOP)
            async with started(ProcessClient(config(), launcher)) as other:
                assert await ask(other)
                assert state_of(other.hello.pid)[1] != parent
            assert await ask(client)

    run(scenario())


def test_a_fork_parent_and_its_engine_may_die_at_once() -> None:
    async def scenario() -> None:
        async with started(ProcessClient(config(), ForkLauncher())) as client:
            said = await ask(client)
            for _ in range(2):
                engine, restarts = client.hello.pid, client.restarts
                for pid in (state_of(engine)[1], engine):
                    os.kill(pid, signal.SIGKILL)
                asking = asyncio.create_task(ask(client))
                await until(lambda: client.restarts > restarts and client.state == "ready")  # noqa: B023
                assert await asking == said
                assert client.restarts == restarts + 1

    run(scenario())


def test_an_engine_is_still_killed_without_its_fork_parent() -> None:
    async def scenario() -> None:
        async with started(ProcessClient(config(), ForkLauncher())) as client:
            engine = client.hello.pid
            parent = state_of(engine)[1]
            os.kill(parent, signal.SIGKILL)
            await until(lambda: ended(parent))
            os.kill(engine, signal.SIGSTOP)
            assert len(await ask(client)) == ANSWER  # by the next one
            assert ended(engine)

    run(scenario())


def test_an_engine_ends_with_its_server_though_its_fork_parent_ended_before() -> None:
    server = subprocess.Popen([sys.executable, "-c", FORKING], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    engine = int(server.stdout.readline())
    parent = state_of(engine)[1]
    os.kill(parent, signal.SIGKILL)

    async def scenario() -> None:
        await until(lambda: ended(parent))
        assert not ended(engine)
        server.kill()
        await until(lambda: ended(engine))

    run(scenario())
    server.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no signal for a parent's death")
@pytest.mark.parametrize("code", [FORKING, SPAWNING])
def test_a_stopped_engine_ends_with_its_server(code: str) -> None:
    """A stopped process notices nothing: without a signal it and its memory would stay."""
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    engine = int(server.stdout.readline())
    parent = state_of(engine)[1]
    stopped = {engine} if parent == server.pid else {engine, parent}

    async def scenario() -> None:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        await until(lambda: {state_of(pid)[0] for pid in stopped} == {"T"})
        server.kill()
        await until(lambda: all(ended(pid) for pid in stopped))

    run(scenario())
    server.communicate()


def test_what_an_engine_has_started_ends_before_the_next_one_starts(tmp_path: Path) -> None:
    left = tmp_path / "left"
    host = f"""
import pathlib, subprocess
child = subprocess.Popen(["sleep", "600"])
pathlib.Path({str(left)!r}).write_text(str(child.pid))
{FAKE_HOST}"""

    async def scenario() -> None:
        async with started(ProcessClient(config(), SpawnLauncher((sys.executable, "-c", host)))) as client:
            child = int(left.read_text())
            os.kill(client.hello.pid, signal.SIGKILL)
            await until(lambda: client.restarts == 1)
            assert ended(child)
            child = int(left.read_text())
            assert not ended(child)
        assert ended(child)

    run(scenario())
