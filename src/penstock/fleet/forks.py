"""Forks keepers and engine processes from a process that has imported their modules: `python -m penstock.fleet.forks
SOCKET`. That process is detached and outlives its starter.

A client connects to the socket and sends a line of JSON. The process answers with a line that has the fork's pid, and
at its end with another that has its exit code. The fork has the other end of the connection too, and so notices when
the client ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from penstock.config import Config
from penstock.errors import EngineUnavailable
from penstock.ipc.launchers import UNSEEN, preloaded

KEEPER, ENGINE = "keeper", "engine"
UNUSED_SECONDS = 15.0  # after which a process without forks exits
LOOK_SECONDS = 1.0  # between two looks whether its folder is still there
START_SECONDS = 20.0  # limit for a start
RETRY_SECONDS = 0.01
STDIN, STDOUT, STDERR = 0, 1, 2


class ForkRequest(msgspec.Struct, frozen=True):
    """Asks for a fork: a keeper with its spec, or an engine with its config, as JSON."""

    kind: str
    payload: msgspec.Raw
    address: str = ""  # the socket of an engine's client


class LiveFork(NamedTuple):
    connection: socket.socket
    pid: int


# -- the process that forks --------------------------------------------------------------------------------------------


class ForkingProcess:
    """Accepts connections and forks until it is of no use any more."""

    def __init__(self, listener: socket.socket, lock: int) -> None:
        self._listener = listener
        self._lock = lock
        self._path = Path(listener.getsockname())
        self._forks: dict[int, LiveFork] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        woken, waking = socket.socketpair()
        for end in (woken, waking):
            end.setblocking(False)
        self._woken = woken
        self._selector.register(woken, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking.fileno())
        self._waking = waking

    def run(self) -> None:
        used = time.monotonic()
        while self._forks or (time.monotonic() - used < UNUSED_SECONDS and self._path.exists()):
            ready = {key.fileobj for key, _ in self._selector.select(LOOK_SECONDS)}
            if self._woken in ready:
                self._woken.recv(4096)
                self._reap()
                used = time.monotonic()
            if self._listener in ready:
                self._fork(self._listener.accept()[0])

    def _fork(self, connection: socket.socket) -> None:
        pid = os.fork()
        if pid:
            self._forks[pid] = LiveFork(connection, pid)
            _tell(connection, pid)
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self._listener, self._woken, self._waking, *(fork.connection for fork in self._forks.values())):
            each.close()
        self._selector.close()
        os.close(self._lock)
        _run_fork(connection)

    def _reap(self) -> None:
        while self._forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if fork := self._forks.pop(pid, None):
                _tell(fork.connection, os.waitstatus_to_exitcode(status))
                fork.connection.close()


def _tell(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody may be interested any more
        connection.sendall(b"%d\n" % number)


def _run_fork(connection: socket.socket) -> NoReturn:
    code = 1
    try:
        request = msgspec.json.decode(_first_line(connection), type=ForkRequest)
        if request.kind == KEEPER:
            from penstock.fleet.keeper import keep

            os.setsid()  # an interrupt of a terminal is for the gateway
            keep(bytes(request.payload))
        else:
            from penstock.ipc.host import serve_forked

            serve_forked(request.address, bytes(request.payload), connection.fileno())
        code = 0
    except BaseException:
        if _is_wanted(connection):  # else its files may be gone already
            sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _first_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        if not (part := connection.recv(2**16)):
            raise EngineUnavailable("whoever wanted this fork has ended")
        data += part
    return data


def _is_wanted(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


def main(path: str) -> None:
    """Imports the modules of forks and serves the socket, detached from its parent. Exits at once if another process
    does so already."""
    lock = _lock(path)
    if lock is None or os.fork():
        os._exit(0)
    os.setsid()
    for ending in (signal.SIGINT, signal.SIGTERM):  # it ends after its forks
        signal.signal(ending, signal.SIG_IGN)
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.dup2(STDERR, STDOUT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
    import penstock.fleet.keeper  # noqa: F401

    for module in preloaded():
        with suppress(ImportError):
            import_module(module)
    gc.collect()
    gc.freeze()
    listener.listen(128)
    ForkingProcess(listener, lock).run()
    for left in (path, f"{path}.lock"):
        Path(left).unlink(missing_ok=True)
    with suppress(OSError):  # others may be in the folder still
        Path(path).parent.rmdir()


def _lock(path: str) -> int | None:
    """Returns the file whose lock the process at the path holds; None: another process holds it."""
    file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


# -- those who want forks ----------------------------------------------------------------------------------------------


def start_forking(path: str) -> None:
    """Starts the process that forks, if there is none at this path; does not wait until it can fork."""
    lock = _lock(path)
    if lock is not None:
        os.close(lock)
        subprocess.Popen([sys.executable, "-m", "penstock.fleet.forks", path], stdin=subprocess.DEVNULL).wait()


class RemoteFork:
    """Represents a fork to its client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reader = reader
        self._writer = writer

    async def wait(self) -> int:
        """Waits until the fork has ended; returns its exit code."""
        if self.returncode is None:
            line = await self._reader.readline()
            self.returncode = int(line) if line else UNSEEN
            self._writer.close()
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


async def fork(path: str, request: ForkRequest) -> RemoteFork:
    """Returns a new fork of the process at the path. Waits for that process while it starts."""
    reader, writer = await _connect(path)
    try:
        writer.write(msgspec.json.encode(request) + b"\n")
        line = await reader.readline()
        if not line:
            raise EngineUnavailable(f"the process that forks engines at {path} has ended")
    except BaseException:
        writer.close()  # so that the fork knows that nobody wants it any more
        raise
    return RemoteFork(reader, writer, int(line))


async def _connect(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            return await asyncio.open_unix_connection(path)
        except OSError as error:
            if time.monotonic() > until:
                raise EngineUnavailable(f"no process forks engines at {path}: {error}") from error
            await asyncio.sleep(RETRY_SECONDS)


class RemoteForkLauncher:
    """Starts engines as forks of the process at a path, which is started again if it has died."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def launch(self, address: str, config: Config) -> RemoteFork:
        await asyncio.to_thread(start_forking, self._path)
        return await fork(self._path, ForkRequest(ENGINE, msgspec.Raw(msgspec.json.encode(config)), address))


if __name__ == "__main__":
    with suppress(FileNotFoundError):  # the fleet has ended before it has begun
        main(sys.argv[1])
