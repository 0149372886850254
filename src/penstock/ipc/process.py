"""Starts one engine process and talks to it over a socket."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from math import inf

import zmq
import zmq.asyncio

from penstock import __version__
from penstock.config import Config
from penstock.engine.flight_recorder import (
    LOADING,
    RECORD_BYTES,
    FlightRecord,
    Pulse,
    read_pulse,
    read_record,
    write_times,
)
from penstock.errors import EngineUnavailable, error_of
from penstock.ipc import wire
from penstock.ipc.engine_folder import FLIGHT, REQUESTS, STACK, EngineMemory, address_in, bind, engine_file
from penstock.ipc.flight_requests import REQUESTS_BYTES, keeps_requests, read_requests
from penstock.ipc.launchers import UNSEEN, EngineChild, Launcher
from penstock.ipc.shared_wire import ID_BITS, ID_MASK
from penstock.ipc.silence import TICK, Silence
from penstock.types import Hello, Request
from penstock.types.messages import Close, Message

log = logging.getLogger(__name__)

STEPS_AT_ONCE = 8  # at most, that are read in one turn of the event loop: then what they brought is sent
DELIVERY_SECONDS = 1.0  # delay of a message after its sender's exit
STACK_SECONDS = 0.1  # limit for a hung engine to write its stacks
LEFT_SECONDS = 1.0  # limit for an engine's process group to end
LEFT_TICK = 0.01  # seconds between two looks whether it has
KILLED = -9  # the exit code after SIGKILL; Windows does not tell who ended a process
MOST_STACK = 2**16  # characters that are read of them


class EngineSocket:
    """Holds the server's end of the socket, in a folder that only this user can enter. One that is dropped is closed:
    the collector would end the context first, and wait for ever for the socket."""

    def __init__(self, *, requests: bool) -> None:
        with ExitStack() as undo:
            self._folder = tempfile.mkdtemp(prefix="penstock-")
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            context = zmq.asyncio.Context()
            self.socket = context.socket(zmq.PAIR)
            self._disconnect = weakref.finalize(self, _disconnect, context, self.socket)
            self._disconnect.atexit = False
            undo.callback(self._disconnect)
            self.address = address_in(self._folder)
            bind(self.socket, self.address)
            self._memories = [EngineMemory(self.address, FLIGHT, RECORD_BYTES)]
            undo.callback(self._memories[0].close)
            if requests:
                self._memories.append(EngineMemory(self.address, REQUESTS, REQUESTS_BYTES))
            undo.pop_all()
        self.flight = self._memories[0].memory
        self.requests = self._memories[1].memory if requests else None

    def close(self) -> None:
        self._disconnect()
        for memory in self._memories:
            memory.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _disconnect(context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> None:
    """Closes a socket, and ends its context in a thread: that waits for ZeroMQ's threads, as no event loop may."""
    socket.close(linger=0)
    with suppress(RuntimeError):  # no thread can be had: the context stays
        threading.Thread(target=context.term, name="penstock-disconnect", daemon=True).start()


class EngineProcess:
    """Represents one running engine process. `launch` makes it, and its caller must `end` it."""

    hello: Hello

    def __init__(self, process: EngineChild, link: EngineSocket) -> None:
        self._process = process
        self._link = link
        self._socket = link.socket
        self._exit = asyncio.create_task(_until_ended(process))
        self._clients: dict[int, str] = {}  # names of those that have joined a shared host, by number
        self._sent = 0  # messages
        self._hang = ""
        self._stopped = False  # it hung because of a signal

    @classmethod
    async def launch(cls, launcher: Launcher, config: Config, times: tuple[int, ...] = ()) -> EngineProcess:
        """Starts a process and waits for its hello. Raises the engine's own error if it cannot start. `times` come from
        the last engine's flight record."""
        engine = await cls.spawn(launcher, config)
        await engine.open(times)
        return engine

    @classmethod
    async def spawn(cls, launcher: Launcher, config: Config) -> EngineProcess:
        """Starts a process, which the caller must `open` before it serves."""
        with ExitStack() as undo:
            try:
                link = EngineSocket(requests=keeps_requests(config))
                undo.callback(link.close)
                process = await launcher.launch(link.address, config)
            except (OSError, zmq.ZMQError) as error:
                raise EngineUnavailable(f"the engine process could not be started: {error}") from error
            undo.pop_all()
            return cls(process, link)

    async def open(self, times: tuple[int, ...], most: float = inf) -> None:
        """Waits for the hello of a process that was spawned, for at most `most` seconds in which it could run. If that
        fails, the process has ended."""
        write_times(self._link.flight, times)
        try:
            self.hello = await self._greet(most)
        except BaseException:
            await self.end(grace=0)
            raise

    def take_over(self) -> None:
        self._socket.send(wire.TAKE_OVER)

    def send(self, message: Message) -> None:
        self._sent += 1
        self._socket.send(wire.encode_message(message))

    async def read(self, take: Callable[[wire.Step], None]) -> str:
        """Calls `take` with every step until the process has ended; returns how it ended. A process that hangs is
        killed."""
        tasks = (
            asyncio.create_task(self._forward(take)),
            asyncio.create_task(self._watch(lambda pulse: pulse.allowed(self._sent))),
        )
        try:
            await asyncio.shield(self._exit)
        finally:
            for task in tasks:
                task.cancel()
        return self._hang or self._ending()

    @property
    def crashed(self) -> bool:
        """Returns whether it ended for a reason of its own, as far as that can be known: SIGKILL and SIGSTOP come from
        outside."""
        return not (self._stopped or self.innocent) if self._hang else self._process.returncode not in (KILLED, UNSEEN)

    @property
    def innocent(self) -> bool:
        """Returns whether no request can be why it ended: it was killed while it compiled."""
        return bool(self._hang) and self.last_flight().compiling

    def last_flight(self) -> FlightRecord:
        return read_record(self._link.flight)

    async def last_suspects(self) -> tuple[tuple[str, int], ...]:
        """Returns the requests that a shared host was working on when its process ended: each with its client's name
        and the id that it has there. The message with a client's name may still be on its way."""
        numbered = [(id >> ID_BITS, id & ID_MASK) for id in sorted(self.last_flight().suspects)]
        with suppress(TimeoutError):
            async with asyncio.timeout(DELIVERY_SECONDS):
                while any(number not in self._clients for number, _ in numbered):
                    self._note_client(wire.decode_answer(await self._socket.recv()))
        return tuple((self._clients[number], id) for number, id in numbered if number in self._clients)

    def last_requests(self) -> list[Request]:
        return [] if self._link.requests is None else read_requests(self._link.requests, self.hello.limits.vocab)

    def last_stack(self) -> str:
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

    async def _greet(self, most: float) -> Hello:
        answer = await self._first_answer(most)
        if isinstance(answer, wire.Refused):
            raise error_of(answer.code, answer.message)
        if not isinstance(answer, wire.Ready) or answer.hello.version != __version__:
            raise EngineUnavailable(
                f"the engine process is not of version {__version__}, as this server is; it sent {answer}"
            )
        return answer.hello

    async def _first_answer(self, most: float) -> wire.Answer:
        message = asyncio.ensure_future(self._socket.recv())
        watching = (
            asyncio.create_task(self._watch(lambda pulse: pulse.limit or LOADING)),
            asyncio.create_task(self._watch(lambda _: most, beats=False)),
        )
        await asyncio.wait({message, self._exit}, return_when=asyncio.FIRST_COMPLETED)
        for task in watching:
            task.cancel()
        if self._hang:
            detail = {"detail": self.last_stack()}
            log.error("the engine process %s while it loaded its model", self._hang, extra=detail)
        else:
            await asyncio.wait({message}, timeout=DELIVERY_SECONDS)
        if not message.done():
            ending = self._hang or self._ending()
            raise EngineUnavailable(f"the engine process {ending} before it was ready; its output above has the reason")
        return wire.decode_answer(message.result())

    async def _forward(self, take: Callable[[wire.Step], None]) -> None:
        try:
            for number in itertools.count(1):
                answer = wire.decode_answer(await self._socket.recv())
                if self._note_client(answer):
                    continue
                assert isinstance(answer, wire.Step)
                take(answer)
                if number % STEPS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except Exception:
            log.exception("a message of the engine process could not be read; the process is killed")
            self._process.kill()

    def _note_client(self, answer: wire.Answer) -> bool:
        if isinstance(answer, wire.ClientJoined):
            self._clients[answer.number] = answer.client
            return True
        return False

    async def _watch(self, allowed: Callable[[Pulse], float], *, beats: bool = True) -> None:
        """Kills the process when it has been silent for longer than is allowed. Without `beats`, its pulse does not end
        the silence."""
        silence = Silence(self._process.pid)
        while not silence.too_long:
            await asyncio.sleep(TICK)
            pulse = read_pulse(self._link.flight)
            silence.observe(pulse.beat if beats else 0, allowed(pulse), time.monotonic())
        what = "was stopped by a signal" if silence.stopped else "did not go on"
        self._hang = f"{what} for {silence.seconds:.1f} s and was killed"
        self._stopped = silence.stopped
        if hasattr(signal, "SIGUSR1"):  # Windows has none, and no stacks of a process that hangs
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self._process.pid, signal.SIGUSR1)
            await asyncio.sleep(STACK_SECONDS)
        self._process.kill()

    def _ending(self) -> str:
        code = self._process.returncode
        if code == UNSEEN:
            return "ended; nobody knows its exit code, because the process that had forked it has died"
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"


async def _until_ended(process: EngineChild) -> None:
    """Waits until a process has ended, with all that it has started: engines lead process groups of their own. The rest
    of a group may hold memory that the next engine needs."""
    await process.wait()
    until = time.monotonic() + LEFT_SECONDS
    with suppress(AttributeError, ProcessLookupError, PermissionError):  # no process groups, or nothing is left
        while process.pid not in (0, os.getpgrp()) and time.monotonic() < until:  # 0 is this process's own group
            os.killpg(process.pid, signal.SIGKILL)
            await asyncio.sleep(LEFT_TICK)
