"""Starts one engine process and talks to it over a socket."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

import zmq
import zmq.asyncio

from penstock import __version__
from penstock.config import Config
from penstock.engine.loop import Close, Message
from penstock.errors import EngineUnavailable, error_of
from penstock.ipc import wire
from penstock.ipc.launchers import EngineChild, Launcher
from penstock.types import Hello

log = logging.getLogger(__name__)

DELIVERY_SECONDS = 1.0  # that a message may still take after its sender has exited


class EngineSocket:
    """Holds the server's end of the socket, in a folder that only this user can enter."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="penstock-")
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.address = f"ipc://{self._folder}/engine"
        self.socket.bind(self.address)

    def close(self) -> None:
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


class EngineProcess:
    """Represents one running engine process. `launch` makes it, and its caller must `end` it."""

    hello: Hello

    def __init__(self, process: EngineChild, link: EngineSocket) -> None:
        self._process = process
        self._link = link
        self._socket = link.socket
        self._exit = asyncio.create_task(process.wait())

    @classmethod
    async def launch(cls, launcher: Launcher, config: Config) -> EngineProcess:
        """Starts a process and waits for its hello. An error that keeps the engine from starting is raised here, with
        the type it had there."""
        try:
            engine = await cls._spawn(launcher, config)
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
        self._socket.send(wire.encode_message(message))

    async def read(self, take: Callable[[wire.Step], None]) -> str:
        """Calls `take` with every step until the process has ended; returns how it ended."""
        reading = asyncio.create_task(self._forward(take))
        try:
            await asyncio.shield(self._exit)
        finally:
            reading.cancel()
        return self._ending()

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
        await asyncio.wait({message, self._exit}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({message}, timeout=DELIVERY_SECONDS)
        if not message.done():
            raise EngineUnavailable(
                f"the engine process {self._ending()} before it was ready; its output above has the reason"
            )
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

    def _ending(self) -> str:
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"
