"""Carries messages between the steward of a fleet and a gateway, or a command."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from penstock.errors import EngineUnavailable, error_of
from penstock.fleet.directory import Directory, ReplicaState
from penstock.fleet.run_file import FleetNotFound, read_run_file
from penstock.fleet.scale import MeasuredLoad
from penstock.fleet.steward_wire import (
    Command,
    CommandRefused,
    DirectoryUpdate,
    FleetSpec,
    FleetStatus,
    FromSteward,
    GatewayBeat,
    GatewayLeave,
    StartFailure,
    WrongProtocol,
    decode_from_steward,
    encode,
)
from penstock.ipc.placement import ScaleStatus

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
CHECK_SECONDS = 0.25  # between two looks whether the steward lives
SILENT = 15.0  # seconds after which a steward that says nothing is replaced
ANSWER_SECONDS = 5.0  # limit for the steward's answer to a command
ENDING_SECONDS = 10.0  # limit for a fleet to end
PAUSE = 1.0  # seconds between two stewards that are started
NOTICE_SECONDS = 0.05
MOST_STARTS = 3
NOTHING_YET = Directory(0, ())


class StewardProcess:
    """Starts the steward's process before its spec is known, so that its imports take no time later."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, "-m", "penstock.fleet.steward", folder]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def tell(self, spec: FleetSpec) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(spec) + b"\n")
            self.process.stdin.close()


@dataclass(slots=True)
class KnownSteward:
    """The steward as a gateway knows it."""

    pid: int  # 0: none has said its id yet
    host: str
    process: StewardProcess | None = None  # if it was started here
    heard: float = field(default_factory=time.monotonic)
    starts: int = 0  # consecutive starts without a message

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def lives(self) -> bool:
        if self.process is not None:
            return self.process.process.poll() is None
        return not self.pid or not self.is_here or lives(self.pid)

    def kill(self) -> None:
        if self.process is not None:
            self.process.process.kill()
            self.process.process.wait()
        elif self.is_here and self.pid and lives(self.pid):
            os.kill(self.pid, signal.SIGKILL)


class StewardLink:
    """Tells a gateway which replicas there are, and starts the steward if there is none: at first, and when it has
    died."""

    def __init__(self, spec: FleetSpec, begin: Callable[[], StewardProcess] | None = None) -> None:
        self.secret = spec.secret
        self.measure: Callable[[], MeasuredLoad | None] = lambda: None  # what the steward is told of the load
        self.scale: ScaleStatus | None = None  # as the steward said last
        self._spec = spec
        self._begin = begin
        self._steward = KnownSteward(spec.steward_pid, spec.host or socket.gethostname())
        self._name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._directory = NOTHING_YET
        self._failure: StartFailure | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Directory:
        if self._begin is not None:
            self._steward.process = self._begin()
            self._steward.process.tell(self._spec)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # a beat is for the steward that there is now
        self._socket.connect(self._spec.address)
        loops = (self._listen(), self._beat(), self._watch())
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        for task in self._tasks:
            task.add_done_callback(log_failure)
        async for directory in self.changes():
            if any(replica.state is ReplicaState.READY for replica in directory.replicas):
                return directory
            if self._failure is not None:
                raise error_of(self._failure.code, self._failure.message)
        raise EngineUnavailable("the steward has ended")  # unreachable: `changes` is endless

    async def changes(self) -> AsyncIterator[Directory]:
        told: tuple[Directory, StartFailure | None] = (NOTHING_YET, None)
        while True:
            if told != (self._directory, self._failure):
                told = self._directory, self._failure
                yield self._directory
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
            await self._leave()
        self._tasks = []
        self._context.destroy(linger=0)

    # -- the steward's messages --------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            try:
                self._take(decode_from_steward(await self._socket.recv_multipart()))
            except WrongProtocol as error:
                self._refuse(error)

    def _refuse(self, error: WrongProtocol) -> None:
        """Logs once that the steward is of another version. This gateway continues with its last directory and does not
        end that steward; without a directory it cannot start."""
        self._steward.heard = time.monotonic()
        if self._failure is None:
            log.error("%s", error)
            self._failure = StartFailure(error.code, error.message)
            self._changed.set()

    def _take(self, message: FromSteward) -> None:
        if not isinstance(message, DirectoryUpdate):
            return
        steward, self.scale = self._steward, message.scale
        steward.heard, steward.starts, steward.pid, steward.host = time.monotonic(), 0, message.steward, message.host
        if message.directory.version >= self._directory.version or message.failure:
            self._directory, self._failure = message.directory, message.failure
            self._changed.set()

    async def _beat(self) -> None:
        while True:
            version = self._directory.version
            with suppress(zmq.Again):  # the steward may be gone
                beat = GatewayBeat(self.secret, self._name, version, self.measure())
                await self._socket.send_multipart(encode(beat, self._name), zmq.NOBLOCK)
            until = time.monotonic() + BEAT_SECONDS
            while time.monotonic() < until and self._directory.version == version:
                await asyncio.sleep(NOTICE_SECONDS)

    async def _leave(self) -> None:
        """Says that this gateway goes. If it was the last one, waits until the fleet has ended."""
        with suppress(zmq.Again):
            leave = GatewayLeave(self.secret, self._name)
            await self._socket.send_multipart(encode(leave, self._name), zmq.NOBLOCK)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                frames = self._socket.recv_multipart
                while not isinstance(status := decode_from_steward(await frames()), FleetStatus):
                    pass
            if not status.gateways:
                async with asyncio.timeout(ENDING_SECONDS):
                    while self._steward.lives():
                        await asyncio.sleep(NOTICE_SECONDS)
        except WrongProtocol:
            return  # it was said before
        except TimeoutError:
            log.error("the fleet has not ended in time; it ends when it has had no gateway for a minute")

    # -- the steward's process ---------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        steward, silent, before = self._steward, 0.0, self._steward.heard
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            silent = silent + CHECK_SECONDS if steward.heard == before else 0.0
            before = steward.heard
            if steward.lives() and (silent < SILENT or not steward.is_here):
                continue  # a steward on another machine is for the gateway there to replace
            silent = 0.0
            self._replace_steward()
            await asyncio.sleep(PAUSE)

    def _replace_steward(self) -> None:
        steward = self._steward
        steward.starts += 1
        if steward.starts > MOST_STARTS:
            reason = "the steward cannot be started; its output above has the reason"
            self._failure = StartFailure(EngineUnavailable.code, reason)
            self._changed.set()
        try:
            spec = read_run_file(Path(self._spec.run_file))
        except FleetNotFound:
            if steward.pid:
                return log.error("the fleet %s has ended", self._spec.name)
            spec = self._spec
        steward.kill()
        log.error("the steward of %s has ended; another one is started", spec.name)
        steward.process = StewardProcess(spec.folder)
        steward.process.tell(spec)


def log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("this gateway does not follow its fleet any more: restart it", exc_info=error)


def is_running(spec: FleetSpec) -> bool:
    """Returns whether the steward of a fleet lives. One on another machine is taken to."""
    return spec.host != socket.gethostname() or lives(spec.steward_pid)


def lives(pid: int) -> bool:
    """Returns whether a process of this id runs. One that has ended, and whose parent has not heard of it, does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not Path("/proc/self").exists()  # a system without such files


async def ask(spec: FleetSpec, command: Command) -> FleetStatus:
    """Returns a steward's answer to a command; raises the error that it answers with, or if it does not answer."""
    context = zmq.asyncio.Context()
    try:
        steward = context.socket(zmq.DEALER)
        steward.connect(spec.address)
        await steward.send_multipart(encode(command, "a command"))
        if not await steward.poll(int(ANSWER_SECONDS * 1000)):
            raise FleetNotFound(
                f"the steward of the fleet {spec.name} (process {spec.steward_pid} on {spec.host}) does not answer: if "
                "its gateway has ended, start another with `penstock fleet gateway`"
            )
        answer = decode_from_steward(await steward.recv_multipart())
    finally:
        context.destroy(linger=0)
    if isinstance(answer, CommandRefused):
        raise error_of(answer.code, answer.message)
    assert isinstance(answer, FleetStatus)
    return answer
