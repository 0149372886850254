"""After a death another engine process waits, with its model loaded, to take over from the next one that is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.ipc import launchers, standby
from penstock.ipc.launchers import ForkLauncher, SpawnLauncher, SpawnThenForkLauncher
from penstock.ipc.process import EngineProcess
from penstock.ipc.spawn import ProcessClient
from penstock.ipc.standby import Standby
from penstock.types import Request, SamplingParams
from tests.engine.test_ipc import LIMITS, VOCAB, events_of, run, started, tokens_of, until
from tests.engine.test_kept_kv import ANSWER, PROMPT, config

SPAWNING = SpawnLauncher()
GPU_HOST = f"""
import os, pathlib
from penstock.backend.fake import FakeBackend
from penstock.engine import build
from penstock.ipc.host import host
from penstock.types import Limits

class Gpu(FakeBackend):
    device = "cuda"
    own_memory = True

class Loaded(Exception):
    pass

def load(config, *_):
    pathlib.Path(config.name, str(os.getpid())).touch()
    raise Loaded

build.open_backend = lambda config, *_: Gpu({VOCAB})
build._tell_memory = load

def open(config, until_needed):
    try:
        build.open_engine(config, until_needed=until_needed)
    except Loaded:
        backend, limits = Gpu({VOCAB}), Limits{tuple(LIMITS)}
        backend.reserve_kv(limits.num_blocks, limits.block_size)
        return build.assemble(backend, limits)

host(open)
"""
PRELOADING = """
import importlib, pathlib, sys
from penstock.ipc import launchers
launchers.DRIVER = pathlib.Path(sys.argv[1])
sys.path.insert(0, sys.argv[1])
for module in launchers.preloaded():
    importlib.import_module(module)
assert sys.modules["torch"].stand_in and sys.modules["triton"].stand_in
assert not any(name.startswith("penstock.backend.cuda") for name in sys.modules)
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "PAUSE", 0.0)
    monkeypatch.setattr(standby, "LONG_PAUSE", 0.0)
    monkeypatch.setattr(standby, "TAKE_SECONDS", 60.0)  # a busy machine may still be loading


async def ask(client: ProcessClient) -> list[int]:
    request = Request(client.next_id(), PROMPT, SamplingParams(temperature=1.0, seed=5), ANSWER)
    return tokens_of(await events_of(client, request))


async def kill(client: ProcessClient) -> None:
    """Kills the engine and waits for the next one."""
    assert client.hello is not None
    restarts = client.restarts
    os.kill(client.hello.pid, signal.SIGKILL)
    await until(lambda: client.restarts == restarts + 1 and client.state == "ready")


async def waiting(client: ProcessClient) -> int:
    """Returns the process that waits to take over."""
    starting = client._standby._starting
    assert starting is not None
    return (await starting)._process.pid


def test_the_process_that_waits_takes_over_with_the_kv_cache() -> None:
    async def scenario() -> None:
        async with started(ProcessClient(config())) as client:
            said = await ask(client)
            assert client._standby._starting is None  # nobody pays for it before the first death
            await kill(client)
            for _ in range(2):
                assert await ask(client) == said
                next_pid = await waiting(client)
                await kill(client)
                assert client.hello is not None
                assert client.hello.pid == next_pid
                assert await ask(client) == said
                assert client.stats.adopted_blocks > 8
            left = await waiting(client)
        assert not Path(f"/proc/{left}").exists()

    run(scenario())


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_another_engine_is_started_if_the_one_that_waits_cannot_take_over(
    kind: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "TAKE_SECONDS", 0.5)

    async def scenario() -> None:
        async with started(ProcessClient(config())) as client:
            said = await ask(client)
            await kill(client)
            lost = await waiting(client)
            os.kill(lost, kind)
            await kill(client)
            assert client.hello is not None
            assert client.hello.pid != lost
            assert await ask(client) == said
            await until(lambda: not Path(f"/proc/{lost}").exists())

    run(scenario())


def test_a_process_that_was_started_for_another_config_is_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        spare, wanted = Standby(SPAWNING), replace(config(), kv_file=str(tmp_path / "kv"))
        (tmp_path / "kv").touch()
        spare.prepare(wanted, os.getpid())
        assert spare._starting is not None
        pid = (await spare._starting)._process.pid
        assert await spare.take(replace(wanted, adapter=("a=b",)), ()) is None
        assert not Path(f"/proc/{pid}").exists()
        spare.prepare(wanted, os.getpid())
        engine = await spare.take(replace(wanted, grammars_wait=True), ())
        assert engine is None  # nothing was started yet
        spare.prepare(wanted, os.getpid())
        await spare._starting
        engine = await spare.take(replace(wanted, grammars_wait=True), ())
        assert isinstance(engine, EngineProcess)
        assert engine.hello.can_stand_by
        await engine.end(5)

    run(scenario())


def test_nothing_waits_without_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        spare = Standby(SPAWNING)
        spare.prepare(config(), 2**22 + 1)  # there is no such process
        assert spare._starting is None
        monkeypatch.setattr(standby, "available_memory", lambda: 2**20)
        spare.prepare(config(), os.getpid())
        assert spare._starting is None

    run(scenario())


def test_nothing_waits_while_the_engine_sleeps_or_if_it_cannot_be_started() -> None:
    class Failing:
        async def launch(self, address: str, config: Config) -> Any:
            raise OSError("no")

    async def scenario() -> None:
        spare = Standby(Failing())
        spare.prepare(config(), os.getpid())
        await asyncio.sleep(0.05)
        assert await spare.take(config(), ()) is None
        async with started(ProcessClient(config())) as client:
            await kill(client)
            pid = await waiting(client)
            client._settings.asleep = True
            await client._standby.close()
            assert not Path(f"/proc/{pid}").exists()
            await kill(client)
            assert client._standby._starting is None

    run(scenario())


def test_who_is_cancelled_while_a_process_starts_leaves_it_to_close() -> None:
    class Hanging:
        def __init__(self) -> None:
            self.begun, self.released = asyncio.Event(), asyncio.Event()

        async def launch(self, address: str, config: Config) -> Any:
            self.begun.set()
            await self.released.wait()
            return await SPAWNING.launch(address, config)

    async def scenario() -> None:
        launcher = Hanging()
        spare = Standby(launcher)
        spare.prepare(config(), os.getpid())
        starting = spare._starting
        assert starting is not None
        await launcher.begun.wait()
        taking = asyncio.create_task(spare.take(config(), ()))
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        launcher.released.set()
        pid = (await starting)._process.pid
        await spare.close()
        assert not Path(f"/proc/{pid}").exists()

    run(scenario())


def test_on_a_gpu_a_process_waits_that_has_loaded_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is none stands in for the GPU, and an error for the loading of weights."""
    monkeypatch.setattr(standby, "TAKE_SECONDS", 0.0)  # no limit for what may have to load

    async def scenario() -> None:
        asked = replace(config(), device="cuda", name=str(tmp_path))
        async with started(ProcessClient(asked, SpawnLauncher((sys.executable, "-c", GPU_HOST)))) as client:
            await kill(client)
            for _ in range(2):
                pid = await waiting(client)
                assert not (tmp_path / str(pid)).exists()
                assert len(await ask(client)) == ANSWER
                await kill(client)
                assert client.hello is not None
                assert client.hello.pid == pid
                assert (tmp_path / str(pid)).exists()

    run(scenario())


def test_what_a_gpu_needs_is_imported_where_engines_are_forked(tmp_path: Path) -> None:
    """All but what opens the GPU: stand-ins for torch and Triton have nothing that could."""
    for package in ("torch", "triton"):
        (tmp_path / f"{package}.py").write_text("stand_in = True")
    subprocess.run([sys.executable, "-c", PRELOADING, tmp_path], check=True)


def test_engines_are_forked_once_one_had_to_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def noting(name: str) -> Any:
        async def launch(*_: object) -> None:
            made.append(name)

        return launch

    monkeypatch.setattr(SpawnLauncher, "launch", noting("spawned"))
    monkeypatch.setattr(ForkLauncher, "launch", noting("forked"))
    monkeypatch.setattr(ForkLauncher, "warm_up", lambda _: made.append("ready to fork"))
    monkeypatch.setattr(launchers, "WARM_UP_AFTER", 0.0)

    async def scenario() -> None:
        launcher = SpawnThenForkLauncher()
        await launcher.launch("", config())
        await until(lambda: len(made) == 2)
        for _ in range(2):
            await launcher.launch("", config())

    run(scenario())
    assert made == ["spawned", "ready to fork", "forked", "forked"]
