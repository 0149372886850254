"""Starts engine processes: as new programs, or as forks of a process that has imported everything already."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.config import Config
from penstock.ipc.post_mortem import DRIVER

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, ForkServerProcess

log = logging.getLogger(__name__)

STDERR = 2
STOPPED = ("T", "t")  # states of a process that a signal or a debugger has stopped
STOPPED_SECONDS = 0.5  # between two looks whether the fork parent is
UNSEEN = -1024  # stands for the exit code of an engine whose fork parent has died before it
PARENT_DIED = 255  # what multiprocessing says then
HOST = (sys.executable, "-m", "penstock.ipc.host")
FORK_PAUSES = (0.0, 0.0, 0.2)  # seconds before each try: a fork parent that was killed may take a moment to end
WARM_UP_AFTER = 1.0  # seconds after the first engine was launched: it has its own imports behind it
PRELOADED = ["penstock.ipc.fork_parent", "penstock.engine.fork_imports", "penstock.ipc.host"]


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
        from multiprocessing.forkserver import ensure_running

        _forkserver()
        ensure_running()

    async def launch(self, address: str, config: Config) -> ForkedChild:
        given = address, msgspec.json.encode(config)
        failure: Exception | None = None
        for pause in FORK_PAUSES:
            await asyncio.sleep(pause)
            try:
                return ForkedChild(await _forked(given), self.warm_up)
            except (OSError, EOFError) as error:  # the fork parent has just died: this starts another
                failure = error
        raise OSError("the process that forks engines ends again and again") from failure


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
    """Represents a forked engine process. It is watched itself, since its fork parent may die before it; then
    `replace_parent` is called in a thread."""

    def __init__(self, process: ForkServerProcess, replace_parent: Callable[[], None]) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self.returncode: int | None = None
        self._process = process
        self._parent = _status(self.pid)[1]
        self._replace_parent = replace_parent
        self._handle: int | None = None
        with suppress(AttributeError, OSError):  # only Linux has such handles; the process may have ended
            self._handle = os.pidfd_open(self.pid)

    async def wait(self) -> None:
        code = asyncio.create_task(self._exit_code())
        if self._handle is not None:
            await _until_readable(self._handle)
            os.close(self._handle)
            self._handle = None
            await _until_done(code, self._parent)
        self.returncode = await code

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)

    async def _exit_code(self) -> int:
        await _until_readable(self._process.sentinel)
        code = self._process.exitcode
        if code is not None and code != PARENT_DIED:
            return code
        log.info("the process that forks engines has died; another one takes its place")
        try:
            await asyncio.to_thread(self._replace_parent)
        except OSError as error:  # the next launch tries it again
            log.warning("the process that forks engines could not be replaced: %s", error)
        if self._handle is None:  # without pidfds only a kill makes sure that the engine has ended
            self.kill()
        return UNSEEN


async def _forked(given: tuple[str, bytes]) -> ForkServerProcess:
    forking = asyncio.create_task(asyncio.to_thread(_fork, given))
    await _until_done(forking)
    return await forking


async def _until_done(task: asyncio.Task[Any], parent: int = 0) -> None:
    """Waits for an answer of the fork parent with this id, by default the one of now. A fork parent that is stopped
    answers nobody: it is killed, so that another one takes its place."""
    while not (await asyncio.wait({task}, timeout=STOPPED_SECONDS))[0]:
        parent = parent or _fork_parent()
        if parent and _status(parent)[0] in STOPPED:
            log.warning("the process that forks engines is stopped; it is killed, and another one takes its place")
            with suppress(ProcessLookupError):
                os.kill(parent, signal.SIGKILL)


def _fork_parent() -> int:
    """Returns the id of the process that forks engines; 0: there is none, or Python does not tell."""
    from multiprocessing import forkserver

    return getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None) or 0


def _status(pid: int) -> tuple[str, int]:
    """Returns the state of a process and the id of its parent; an empty state on systems without such files."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return "", 0
    return state, int(parent)


def _fork(given: tuple[str, bytes]) -> ForkServerProcess:
    from penstock.ipc.host import serve_forked

    process = _forkserver().Process(target=serve_forked, args=given)
    process.start()
    return process


async def _until_readable(file: int) -> None:
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(file, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(file)


def preloaded() -> list[str]:
    """Returns the modules that a process imports before engines are forked from it, where they can be imported. None of
    them opens a GPU: no fork could use that then."""
    return [*PRELOADED, *(("torch", "triton") if DRIVER.exists() else ())]


@cache
def _forkserver() -> ForkServerContext:
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded())
    return context
