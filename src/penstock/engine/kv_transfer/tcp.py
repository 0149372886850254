"""Carries blocks over TCP, to any machine. Nothing is encrypted: keep it within a network that is trusted."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, nullcontext

from penstock.engine.kv_transfer.carrier import welcome_of
from penstock.engine.kv_transfer.staging import StagedBlocks
from penstock.engine.kv_transfer.wire import GENERATION, REPLY, SECONDS, BlockPart, receive, receive_into

SCHEME = "tcp"
BUFFER = 4 << 20  # bytes on their way
CONNECT = 1.0  # seconds


class TcpListener:
    """Listens on a host and port, 0 for any: see Listener."""

    sends_contents = True

    def __init__(self, host: str, port: int = 0) -> None:
        self._socket = socket.create_server((host, port))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self.address = f"{SCHEME}:{host}:{self._socket.getsockname()[1]}"

    def accept(self) -> socket.socket:
        connection, _ = self._socket.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def serving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def welcome(self, connection: socket.socket, staging: StagedBlocks) -> None:
        connection.sendall(welcome_of(staging))

    def send(self, connection: socket.socket, staging: StagedBlocks, part: BlockPart) -> None:
        connection.sendall(staging.read(part.place))
        connection.sendall(GENERATION.pack(staging.generation(part.place)))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class TcpSource:
    """Receives blocks: see OfferSource. Raises OSError if the engine does not exist."""

    scheme = SCHEME

    def __init__(self, rest: str) -> None:
        host, _, port = rest.rpartition(":")
        self.connection = socket.create_connection((host, int(port)), CONNECT)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self.connection.settimeout(SECONDS)

    def enter(self) -> int:
        status, _, _ = REPLY.unpack(receive(self.connection, REPLY.size))
        return int(status)

    def read(self, part: BlockPart, target: memoryview) -> bool:
        receive_into(self.connection, target)
        (after,) = GENERATION.unpack(receive(self.connection, GENERATION.size))
        return bool(after == part.generation)

    def close(self) -> None:
        self.connection.close()
