"""Starts one engine process and talks to it over a socket."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from math import inf

import zmq
import zmq.asyncio

from penstock import __version__
from penstock.config import Config
from penstock.engine.flight_recorder import LEAST, LOADING, FlightRecord, read_pulse, read_record, write_times
from penstock.engine.loop import Close, Message
from penstock.errors import EngineUnavailable, error_of
from penstock.ipc import wire
from penstock.ipc.engine_folder import STACK, FlightMemory, address_in, engine_file
from penstock.ipc.launchers import EngineChild, Launcher
from penstock.types import Hello

log = logging.getLogger(__name__)

DELIVERY_SECONDS = 1.0  # that a message may still take after its sender has exited
TICK = 0.1  # seconds between two looks at an engine's pulse
STACK_SECONDS = 0.1  # that a hung engine has to write its stacks
MOST_STACK = 2**16  # characters that are read of them


class EngineSocket:
    """Holds the server's end of the socket, in a folder that only this user can enter."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="penstock-")
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.address = address_in(self._folder)
        self.socket.bind(self.address)
        self._flight = FlightMemory(self.address)
        self.flight = self._flight.memory

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._flight.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class EngineProcess:
    """Represents one running engine process. `launch` makes it, and its caller must `end` it."""

    hello: Hello

    def __init__(self, process: EngineChild, link: EngineSocket) -> None:
        self._process = process
        self._link = link
        self._socket = link.socket
        self._exit = asyncio.create_task(process.wait())
        self._sent = 0  # messages
        self._hang = ""

    @classmethod
    async def launch(cls, launcher: Launcher, config: Config, times: tuple[int, ...] = ()) -> EngineProcess:
        """Starts a process and waits for its hello. An error that keeps the engine from starting is raised here, with
        the type it had there. `times` are those of the flight record of the engine before."""
        try:
            engine = await cls._spawn(launcher, config)
            write_times(engine._link.flight, times)
        except (OSError, zmq.ZMQError) as error:
            raise EngineUnavailable(f"the engine process could not be started: {error}") from error
        try:
            engine.hello = await engine._greet()
        except BaseException:
            await engine.end(grace=0)
            raise
        return engine

    @classmethod
    async def _spawn(cls, launcher: Launcher, config: Config) -> EngineProcess:
        with ExitStack() as undo:
            link = EngineSocket()
            undo.callback(link.close)
            process = await launcher.launch(link.address, config)
            undo.pop_all()
            return cls(process, link)

    def send(self, message: Message) -> None:
        self._sent += 1
        self._socket.send(wire.encode_message(message))

    async def read(self, take: Callable[[wire.Step], None]) -> str:
        """Calls `take` with every step until the process has ended; returns how it ended. A process that hangs is
        killed."""
        tasks = asyncio.create_task(self._forward(take)), asyncio.create_task(self._watch(self._allowed))
        try:
            await asyncio.shield(self._exit)
        finally:
            for task in tasks:
                task.cancel()
        return self._hang or self._ending()

    @property
    def crashed(self) -> bool:
        """Returns whether it ended for a reason of its own, as far as that can be known: SIGKILL comes from outside."""
        return bool(self._hang) or self._process.returncode != -signal.SIGKILL

    def last_flight(self) -> FlightRecord:
        """Returns what the engine was doing when its process ended."""
        return read_record(self._link.flight)

    def last_stack(self) -> str:
        """Returns the stacks of its threads when a signal ended it, or when it hung."""
        try:
            with engine_file(self._link.address, STACK).open(errors="replace") as file:
                return file.read(MOST_STACK)
        except OSError:
            return ""

    async def end(self, grace: float) -> None:
        """Asks the process to exit, and kills it if it has not within `grace` seconds."""
        if not self._exit.done():
            self.send(Close())
            await asyncio.wait({self._exit}, timeout=grace)
        if not self._exit.done():
            self._process.kill()
            await self._exit
        self._link.close()

    async def _greet(self) -> Hello:
        answer = await self._first_answer()
        if isinstance(answer, wire.Refused):
            raise error_of(answer.code, answer.message)
        if not isinstance(answer, wire.Ready) or answer.hello.version != __version__:
            raise EngineUnavailable(
                f"the engine process is not of version {__version__}, as this server is; it sent {answer}"
            )
        return answer.hello

    async def _first_answer(self) -> wire.Answer:
        message = asyncio.ensure_future(self._socket.recv())
        watching = asyncio.create_task(self._watch(lambda limit, _: limit or LOADING))
        await asyncio.wait({message, self._exit}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if self._hang:
            log.error("the engine process %s while it loaded its model\n%s", self._hang, self.last_stack())
        else:
            await asyncio.wait({message}, timeout=DELIVERY_SECONDS)
        if not message.done():
            ending = self._hang or self._ending()
            raise EngineUnavailable(f"the engine process {ending} before it was ready; its output above has the reason")
        return wire.decode_answer(message.result())

    async def _forward(self, take: Callable[[wire.Step], None]) -> None:
        try:
            while True:
                answer = wire.decode_answer(await self._socket.recv())
                assert isinstance(answer, wire.Step)
                take(answer)
        except Exception:
            log.exception("a message of the engine process could not be read; the process is killed")
            self._process.kill()

    def _allowed(self, limit: float, taken: int) -> float:
        """Returns for how many seconds the engine may be silent, by the limit that it states and the messages that it
        has taken."""
        return limit or (LEAST if taken < self._sent else inf)

    async def _watch(self, allowed: Callable[[float, int], float]) -> None:
        """Kills the process when it has been silent for longer than is allowed. What counts is the time that this
        process was awake to see."""
        beat, silent, before = -1, 0.0, time.monotonic()
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            seen, limit, taken = read_pulse(self._link.flight)
            most = allowed(limit, taken)
            silent = silent + min(now - before, 2 * TICK) if most < inf and seen == beat else 0.0
            beat, before = seen, now
            if silent > most:
                self._hang = f"did not go on for {silent:.1f} s and was killed"
                os.kill(self._process.pid, signal.SIGUSR1)
                await asyncio.sleep(STACK_SECONDS)
                self._process.kill()
                return

    def _ending(self) -> str:
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"
