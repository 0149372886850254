"""Holds the connection of a gateway with one engine: from joining it to its loss.

A connection is used for one life only. When the engine's process ends, the kernel closes the socket and the connection
is lost within milliseconds; a process or a machine that has stopped is noticed by heartbeats of the transport, which do
not depend on what the engine computes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.errors import EngineUnavailable
from penstock.fleet.directory import ReplicaInfo
from penstock.ipc import shared_wire, wire
from penstock.ipc.shared_wire import AskSnapshot, Beat, Farewell, Join, Joined, Leave, LinkMessage, Snapshot
from penstock.types import Hello
from penstock.types.messages import Message

log = logging.getLogger(__name__)

HEARTBEAT_MS = 250  # between two heartbeats of the transport
HEARTBEAT_TIMEOUT_MS = 1000  # without an answer to one: the engine's process has stopped
BEAT_SECONDS = 1.0  # between two messages that show the engine that this gateway lives
JOIN_SECONDS = 60.0  # limit for an answer: the engine may be within a long step
READ_AT_ONCE = 8  # messages in one turn of the event loop: what they brought is sent before others are read
GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Credentials(NamedTuple):
    """Says who joins an engine."""

    client: str  # the gateway's name, which no other has
    secret: str


class ReplicaOwner(Protocol):
    """Takes the messages of a replica."""

    def take_step(self, replica: Replica, step: wire.Step) -> None: ...

    def take_snapshot(self, replica: Replica, snapshot: Snapshot) -> None: ...


class WatchedSocket:
    """Reads a zmq socket in the thread of an event loop, without a future for each message."""

    def __init__(self, socket: zmq.Socket[bytes], read: Callable[[], None]) -> None:
        self.socket = socket
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._file = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file, self._drain)
        self.look()

    def look(self) -> None:
        """Schedules a read if there are messages. The socket's file signals only once, so this is called after writes,
        too."""
        if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._drain)

    def close(self) -> None:
        if not self.socket.closed:
            self._loop.remove_reader(self._file)
            self.socket.close(linger=0)

    def _drain(self) -> None:
        try:
            for _ in range(READ_AT_ONCE):
                if self.socket.closed:
                    return
                self._read()
            self._loop.call_soon(self._drain)
        except zmq.Again:
            pass


class Replica:
    """Represents an engine that this gateway may send requests to. `number` stands for its name in the router."""

    hello: Hello  # once it has joined

    def __init__(
        self,
        info: ReplicaInfo,
        number: int,
        credentials: Credentials,
        owner: ReplicaOwner,
        when_lost: Callable[[Replica, str, bool], None],
    ) -> None:
        """Calls `when_lost` with the reason, and whether the engine was asked to end."""
        self.info = info
        self.number = number
        self.ready = False  # it may be sent requests
        self.draining = False
        self._credentials = credentials
        self._owner = owner
        self._when_lost = when_lost
        self._joined: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._beats: asyncio.Task[None] | None = None
        self._lost = False

    @property
    def name(self) -> str:
        return self.info.name

    # -- joining and leaving -------------------------------------------------------------------------------------

    async def join(self, context: zmq.Context[zmq.Socket[bytes]]) -> Hello:
        """Connects, and returns the engine's hello; raises EngineUnavailable if it cannot be joined."""
        socket = context.socket(zmq.DEALER)
        for option, value in _OPTIONS.items():
            socket.setsockopt(option, value)
        self._monitor = WatchedSocket(socket.get_monitor_socket(GONE), self._read_monitor)
        self._socket = WatchedSocket(socket, self._read)
        try:
            socket.connect(self.info.address)
            self._tell(Join(self._credentials.secret, self._credentials.client))
            await asyncio.wait_for(asyncio.shield(self._joined), JOIN_SECONDS)
        except TimeoutError:
            self.close()
            raise EngineUnavailable(f"{self.name} did not answer within {JOIN_SECONDS:g} s") from None
        except (zmq.ZMQError, EngineUnavailable) as error:
            self.close()
            raise EngineUnavailable(f"{self.name} cannot be joined at {self.info.address}: {error}") from error
        except asyncio.CancelledError:
            self.close()  # nobody else would, and what it says would count for the engine that is joined in its place
            raise
        self._beats = asyncio.create_task(self._beat())
        return self.hello

    def leave(self) -> None:
        if not self._lost:
            self._tell(Leave())
            self._socket.socket.setsockopt(zmq.LINGER, 100)
            self.close()

    def close(self) -> None:
        """Closes the connection. Nothing more comes from it."""
        if self._lost:
            return
        self._lost, self.ready = True, False
        if self._beats is not None:
            self._beats.cancel()
        self._socket.socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    # -- talking -------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        if not self._lost:
            self._put([wire.encode_message(message)])

    def ask_snapshot(self) -> None:
        self._tell(AskSnapshot())

    def _tell(self, message: LinkMessage) -> None:
        self._put(shared_wire.encode_link(message))

    def _put(self, frames: Sequence[bytes]) -> None:
        with suppress(zmq.Again):  # nobody is connected any more: the monitor is about to say so, and the rest follows
            self._socket.socket.send_multipart(frames, zmq.NOBLOCK)
        self._socket.look()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._tell(Beat())

    def _read(self) -> None:
        data = self._socket.socket.recv(zmq.NOBLOCK)
        try:
            answer = shared_wire.decode_link_answer(data)
        except msgspec.DecodeError as error:
            return self._lose(f"sent what cannot be read: {error}")
        match answer:
            case wire.Step():
                self._owner.take_step(self, answer)
            case Snapshot():
                self._owner.take_snapshot(self, answer)
            case Joined(hello):
                self.hello = hello
                self._joined.set_result(hello)
            case wire.Refused(code, message):
                self._lose(f"refused this gateway ({code}): {message}")
            case Farewell(reason):
                self._lose(f"has ended: {reason}", innocent=True)

    def _read_monitor(self) -> None:
        parse_monitor_message(self._monitor.socket.recv_multipart(zmq.NOBLOCK))
        while not self._lost:  # its last messages
            try:
                self._read()
            except zmq.Again:
                break
        self._lose("has closed the connection, or has stopped")

    def _lose(self, reason: str, *, innocent: bool = False) -> None:
        if self._lost:
            return
        joined = self._joined.done()
        self.close()
        if joined:
            self._when_lost(self, f"{self.name} {reason}", innocent)
        else:
            self._joined.set_exception(EngineUnavailable(reason))


_OPTIONS = {
    zmq.SNDHWM: 0,
    zmq.RCVHWM: 0,
    zmq.LINGER: 0,
    zmq.RECONNECT_IVL: -1,
    zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
    zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
}
