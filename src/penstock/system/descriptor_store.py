"""Keeps file descriptors of a process that may die for the process that comes after it, as systemd's FDSTORE does.

The store is a thread of a process that outlives both. Others reach it over a Unix socket in Linux's abstract namespace,
which disappears with the store. Each connection carries one request:

{"put": NAME, "count": N}  and N descriptors, which replace the descriptors of that name all at once
{"get": NAME}              is answered by {"count": N} and copies of the descriptors
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

MOST_AT_ONCE = 200  # descriptors of one message; Linux takes 253
MESSAGE_BYTES = 1 << 12
PATIENCE = 5.0  # seconds
PEER = struct.Struct("3i")  # process, user and group at the other end of a socket


class DescriptorStore:
    """Holds descriptors by name. A closed store can be opened again, and is empty."""

    def __init__(self) -> None:
        self._kept: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._address = ""

    def open(self) -> str:
        """Returns the address of the store; empty: it cannot be opened on this system, or too many files are open."""
        if self._socket is None and sys.platform == "linux":
            address = f"@penstock-{os.getpid()}-{secrets.token_hex(8)}"
            with suppress(OSError):
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                listener.bind(_bound(address))
                listener.listen()
                threading.Thread(target=self._serve, args=[listener], name="penstock-store", daemon=True).start()
                self._socket, self._address = listener, address
        return self._address

    def close(self) -> None:
        """Closes all descriptors."""
        with self._lock:
            listener, self._socket, self._address = self._socket, None, ""
            for name in list(self._kept):
                self._replace(name, [])
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            listener.close()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # it is closed
            with connection, suppress(OSError, ValueError, TypeError, LookupError):  # it may end at any moment
                connection.settimeout(PATIENCE)
                if _user_of(connection) == os.geteuid():
                    self._answer(connection, listener)

    def _answer(self, connection: socket.socket, listener: socket.socket) -> None:
        request = json.loads(connection.recv(MESSAGE_BYTES))
        if "get" in request:
            with self._lock:
                copies = [os.dup(each) for each in self._kept.get(request["get"], [])]
            try:
                connection.send(_message(count=len(copies)))
                _send(connection, copies)
            finally:
                _close(copies)
            return
        received = _receive(connection, request["count"])
        with self._lock:
            if listener is not self._socket:  # closed meanwhile: nobody will ask for them
                return _close(received)
            self._replace(request["put"], received)
        connection.send(_message(count=len(received)))

    def _replace(self, name: str, descriptors: Sequence[int]) -> None:
        _close(self._kept.pop(name, []))
        if descriptors:
            self._kept[name] = list(descriptors)


def put_descriptors(address: str, name: str, descriptors: Sequence[int]) -> None:
    """Stores copies of descriptors under a name, which replace the ones there. Without any, the name is dropped.
    Raises OSError if the store is gone."""
    with _connected(address) as connection:
        connection.send(_message(put=name, count=len(descriptors)))
        _send(connection, descriptors)
        _count_in(connection)


def get_descriptors(address: str, name: str) -> list[int]:
    """Returns copies of the descriptors that a store keeps under a name, which the caller closes. Raises OSError."""
    with _connected(address) as connection:
        connection.send(_message(get=name))
        return _receive(connection, _count_in(connection))


def _connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(PATIENCE)
        connection.connect(_bound(address))
    except BaseException:
        connection.close()
        raise
    return connection


def _bound(address: str) -> str:
    """Returns an address as the system has it: in the abstract namespace it begins with a null byte."""
    return address.replace("@", "\0", 1)


def _user_of(connection: socket.socket) -> int:
    return int(PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[1])


def _message(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _count_in(connection: socket.socket) -> int:
    answer = connection.recv(MESSAGE_BYTES)
    if not answer:
        raise ConnectionError("the store of descriptors has closed the connection")
    return int(json.loads(answer)["count"])


def _send(connection: socket.socket, descriptors: Sequence[int]) -> None:
    for first in range(0, len(descriptors), MOST_AT_ONCE):
        socket.send_fds(connection, [b"+"], descriptors[first : first + MOST_AT_ONCE])


def _receive(connection: socket.socket, count: int) -> list[int]:
    """Returns that number of descriptors. If some do not come, it closes the rest and raises OSError."""
    received: list[int] = []
    try:
        while len(received) < count:
            _, some, flags, _ = socket.recv_fds(connection, 1, MOST_AT_ONCE, socket.MSG_CMSG_CLOEXEC)
            received += some
            if not some or flags & socket.MSG_CTRUNC:
                raise ConnectionError(f"{len(received)} of {count} descriptors have come")
    except BaseException:
        _close(received)
        raise
    return received


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)
