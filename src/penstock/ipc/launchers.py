"""Starts engine processes: as new programs, or as forks of a process that has imported everything already."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.config import Config

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, ForkServerProcess

STDERR = 2
HOST = (sys.executable, "-m", "penstock.ipc.host")
WARM_UP_AFTER = 1.0  # seconds after the first engine was launched: it has its own imports behind it
PRELOADED = ["penstock.ipc.fork_parent", "penstock.engine.preloaded", "penstock.ipc.host"]


class EngineChild(Protocol):
    """Represents a process that was started."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """Returns the exit code; below 0 it is a signal's number; None while the process runs."""

    async def wait(self) -> object:
        """Waits until the process has ended."""

    def kill(self) -> None: ...


class Launcher(Protocol):
    """Starts processes that serve an engine."""

    async def launch(self, address: str, config: Config) -> EngineChild:
        """Returns a process that will connect to the address and serve the config's model there."""


class SpawnLauncher:
    """Starts each engine as a program of its own."""

    def __init__(self, command: Sequence[str] = HOST) -> None:
        self._command = command

    async def launch(self, address: str, config: Config) -> Process:
        process = await asyncio.create_subprocess_exec(
            *self._command, address, stdin=PIPE, stdout=STDERR, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        return process


class ForkLauncher:
    """Starts each engine as a fork of a process that has imported what engines need: that saves most of a start."""

    def warm_up(self) -> None:
        """Starts that process, so that the first engine does not wait for its imports."""
        from multiprocessing.forkserver import ensure_running

        _forkserver()
        ensure_running()

    async def launch(self, address: str, config: Config) -> ForkedChild:
        from penstock.ipc.host import serve_forked

        process = _forkserver().Process(target=serve_forked, args=(address, msgspec.json.encode(config)))
        await asyncio.to_thread(process.start)
        return ForkedChild(process)


FORKING = ForkLauncher()


class SpawnThenForkLauncher:
    """Starts the first engine as a program, since that has nothing to wait for, and the next ones as forks of a process
    that is started soon after it: streams wait half as long for an engine that is forked."""

    def __init__(self) -> None:
        self._launcher: Launcher = SpawnLauncher()

    async def launch(self, address: str, config: Config) -> EngineChild:
        launcher, self._launcher = self._launcher, FORKING
        if launcher is not FORKING:
            asyncio.get_running_loop().call_later(WARM_UP_AFTER, FORKING.warm_up)
        return await launcher.launch(address, config)


class ForkedChild:
    """Represents a forked engine process."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)

    def kill(self) -> None:
        self._process.kill()


@cache
def _forkserver() -> ForkServerContext:
    """Returns the one context that forks engines, with what they import named."""
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
