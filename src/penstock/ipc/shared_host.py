"""Shares one engine process among several clients.

The process that started the host keeps its PAIR link; clients join at a ROUTER socket. A client's number is part of its
requests' ids in the engine, so that events find their way back without a table, and the flight record of a dead engine
shows the owner of each request.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from penstock.engine.engine import Engine
from penstock.engine.router_feed import NoBlockFeed
from penstock.ipc import shared_wire, wire
from penstock.ipc.engine_folder import SCHEME
from penstock.ipc.flight_requests import FlightRequests
from penstock.ipc.inprocess_engine import hello_of
from penstock.ipc.shared_wire import ID_BITS, ID_MASK, AskSnapshot, Beat, Join, Leave, LinkAnswer
from penstock.types import BlockEvent, Event, Stats, Tokens
from penstock.types.messages import Abort, Add, Close, FlushCache, Message, Prefill, Release

ANYWHERE = "ipc://*"  # stands for a socket in the folder of the engine's own
SILENT = 10.0  # seconds after which a client that says nothing has lost what it had in flight
ABANDONED = 60.0  # seconds without anyone to serve after which an engine ends that nobody keeps
TICK = 1.0  # seconds between two looks at who is silent
STATS_SECONDS = 0.02  # between two statistics for a client that has no events
KEEPER_SECONDS = 0.5  # between two reports to whoever keeps this process
LINGER_MS = 1000  # limit for the last messages


class Sockets(NamedTuple):
    """The link with the keeper of this process, and the socket that clients join at."""

    keeper: zmq.Socket[bytes]
    clients: zmq.Socket[bytes]

    @property
    def address(self) -> str:
        return str(self.clients.getsockopt_string(zmq.LAST_ENDPOINT))


def listen(context: zmq.Context[zmq.Socket[bytes]], address: str, own: Path) -> zmq.Socket[bytes]:
    """Returns a socket that clients can join at the address, or in the file `own` if that is anywhere. Nothing that is
    sent to a client is dropped as long as it is there."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    try:
        socket.bind(f"{SCHEME}{own}" if address == ANYWHERE else address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


class SharedClient:
    """Represents a client that has joined."""

    __slots__ = ("heard", "in_flight", "name", "number", "received", "route", "told")

    def __init__(self, route: bytes, name: str, number: int) -> None:
        self.route = route  # where its messages go
        self.name = name
        self.number = number
        self.in_flight: set[int] = set()  # requests, by their ids in the engine
        self.received = 0
        self.heard = self.told = time.monotonic()

    def engine_id(self, id: int) -> int:
        return self.number << ID_BITS | (id & ID_MASK)

    def take(self, message: Message) -> Message:
        match message:
            case Add(request):
                id = self.engine_id(request.id)
                self.received += 1
                self.in_flight.add(id)
                return Add(request._replace(id=id))
            case Abort(id):
                return Abort(self.engine_id(id))
            case FlushCache() | Close() | Release():
                return message
        id = self.engine_id(message.id)
        if isinstance(message, Prefill):
            self.in_flight.add(id)
        return message._replace(id=id)

    def own(self, stats: Stats) -> Stats:
        """Returns statistics for the client: they name only its own requests."""
        if not stats.prefilling:
            return stats
        return stats._replace(prefilling=tuple(id & ID_MASK for id in stats.prefilling if id >> ID_BITS == self.number))

    def share(self, events: Iterable[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            if not isinstance(event, Tokens):
                self.in_flight.discard(event.seq)
            told.append(event._replace(seq=event.seq & ID_MASK))
        return told


class SharedHost:
    """Is the inbox of an engine's loop, and sends each client its share of every step. If it is `orphaned`, and nobody
    has joined for a while, it ends the loop."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        sockets: Sockets,
        secret: str,
        orphaned: Callable[[], bool],
        requests: FlightRequests | None = None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._keeper, self._socket = sockets
        self._address = sockets.address
        self._secret = secret.encode()
        self._orphaned = orphaned
        self._requests = requests
        self._clients: dict[bytes, SharedClient] = {}  # route -> client
        self._joins = 0
        self._looked = self._served = time.monotonic()
        self._reported = 0.0
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._tell_keeper(wire.Ready(hello_of(engine, model, self._address)))
        self._tell_keeper(wire.step([], engine.stats()))

    # -- messages from clients -----------------------------------------------------------------------------------

    def take(self, wait: bool) -> list[Message]:
        """Returns the messages for the engine that have arrived. With `wait` it waits for some, for a tick at most."""
        if wait:
            self._poller.poll(int(TICK * 1000))
        messages: list[Message] = []
        with suppress(zmq.Again):
            while True:
                messages.append(wire.decode_message(self._keeper.recv(zmq.NOBLOCK)))
        with suppress(zmq.Again):
            while True:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                messages += self._read(route, frames)
        now = time.monotonic()
        if now - self._looked >= TICK:
            messages += self._look_around(now)
        return messages

    def _read(self, route: bytes, frames: list[bytes]) -> list[Message]:
        """Reads a client's message. One that cannot be read costs the client its place."""
        client = self._clients.get(route)
        try:
            if len(frames) == 2:
                return self._answer_link(route, client, shared_wire.decode_link(frames[1]))
            if client is None:
                self._refuse(route, shared_wire.NOT_JOINED, "join first: this engine does not know the connection")
                return []
            client.heard = time.monotonic()
            message = wire.decode_message(frames[0])
            return self._drop(client) if isinstance(message, Close) else [self._noted(client.take(message))]
        except (msgspec.DecodeError, IndexError) as error:
            self._refuse(route, shared_wire.MALFORMED, f"a message could not be read: {error}")
            return [] if client is None else self._drop(client)

    def _noted(self, message: Message) -> Message:
        if self._requests is not None and isinstance(message, Add):
            self._requests.add(message.request)
        if self._requests is not None and isinstance(message, Prefill):
            self._requests.add(message.request._replace(id=message.id, max_tokens=1))
        return message

    def _answer_link(
        self, route: bytes, client: SharedClient | None, message: shared_wire.LinkMessage
    ) -> list[Message]:
        if isinstance(message, Join):
            return self._join(route, message)
        if client is None:
            self._refuse(route, shared_wire.NOT_JOINED, "join first: this engine does not know the connection")
            return []
        client.heard = time.monotonic()
        match message:
            case AskSnapshot():
                self._tell(client, shared_wire.Snapshot(self._engine.find(NoBlockFeed).snapshot()))
            case Leave():
                return self._drop(client)
            case Beat():
                pass
        return []

    def _join(self, route: bytes, join: Join) -> list[Message]:
        if not hmac.compare_digest(join.secret.encode(), self._secret):
            self._refuse(route, shared_wire.WRONG_SECRET, "the secret is not this fleet's: read it from the run folder")
            return []
        protocol = shared_wire.common_protocol(join)
        if protocol is None:
            ours, theirs = _window(shared_wire.OLDEST, shared_wire.PROTOCOL), _window(join.oldest, join.protocol)
            reason = f"this engine speaks protocol {ours} and the client {theirs}: upgrade the older one"
            self._refuse(route, shared_wire.WRONG_PROTOCOL, reason)
            return []
        lost = [message for old in self._named(join.client, route) for message in self._drop(old)]
        self._joins += 1
        client = self._clients[route] = SharedClient(route, join.client, self._joins)
        self._tell_keeper(wire.ClientJoined(client.number, client.name))
        hello = hello_of(self._engine, self._model, self._address)
        self._tell(client, shared_wire.Joined(hello, protocol, client.number))
        self._tell(client, shared_wire.Snapshot(self._engine.find(NoBlockFeed).snapshot()))
        self._tell(client, wire.step([], client.own(self._engine.stats())))
        return lost

    def _named(self, name: str, route: bytes) -> list[SharedClient]:
        return [client for client in self._clients.values() if client.name == name or client.route == route]

    def _drop(self, client: SharedClient) -> list[Message]:
        """Forgets a client; returns the aborts of its requests."""
        del self._clients[client.route]
        return [Abort(id) for id in client.in_flight]

    def _look_around(self, now: float) -> list[Message]:
        """Drops the clients that were silent for too long. What they had sent meanwhile has been read."""
        self._looked = now
        silent = [client for client in self._clients.values() if now - client.heard > SILENT]
        aborts = [message for client in silent for message in self._drop(client)]
        if self._clients or not self._orphaned():
            self._served = now
        return [Close()] if now - self._served > ABANDONED else aborts

    # -- messages to clients -------------------------------------------------------------------------------------

    def send(self, events: list[Event], stats: Stats, blocks: list[BlockEvent]) -> None:
        """Sends each client the events of its own requests, and all of them statistics and block events. A client
        without events gets statistics now and then, and always when the engine becomes idle."""
        shares: dict[int, list[Event]] = {}
        for event in events:
            shares.setdefault(event.seq >> ID_BITS, []).append(event)
            if self._requests is not None and not isinstance(event, Tokens):
                self._requests.end(event.seq)
        now, busy, stats = time.monotonic(), stats.running or stats.waiting, stats._replace(clients=len(self._clients))
        for client in self._clients.values():
            own = shares.get(client.number)
            if own or blocks or not busy or now - client.told > STATS_SECONDS:
                client.told = now
                self._tell(client, wire.step(client.share(own or ()), client.own(stats), blocks, client.received))
        if 0 in shares or not busy or now - self._reported > KEEPER_SECONDS:
            self._reported = now
            self._tell_keeper(wire.step(shares.get(0, ()), stats))

    def say_farewell(self) -> None:
        for client in self._clients.values():
            self._tell(client, shared_wire.Farewell("it was asked to end"))

    def _tell(self, client: SharedClient, answer: LinkAnswer) -> None:
        self._socket.send_multipart((client.route, shared_wire.encode_link_answer(answer)))

    def _refuse(self, route: bytes, code: str, reason: str) -> None:
        self._socket.send_multipart((route, shared_wire.encode_link_answer(wire.Refused(code, reason))))

    def _tell_keeper(self, answer: wire.Answer) -> None:
        """Sends a message to the keeper of this process, if it reads."""
        with suppress(zmq.Again):
            self._keeper.send(wire.encode_answer(answer), zmq.NOBLOCK)


def _window(oldest: int, newest: int) -> str:
    return str(newest) if oldest == newest else f"{oldest} to {newest}"
