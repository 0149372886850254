"""Names the files in the folder that a client shares with its engine process: the socket, the flight record, the
requests of other clients, the stacks of a process that has died, and the socket at which further clients join."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import zmq

SCHEME = "ipc://"
SOCKET, FLIGHT, REQUESTS, STACK, CLIENTS = "engine", "flight", "requests", "stack", "clients"


def address_in(folder: str) -> str:
    return f"{SCHEME}{folder}/{SOCKET}"


def engine_file(address: str, name: str) -> Path:
    return Path(address.removeprefix(SCHEME)).parent / name


def bind(socket: zmq.Socket[Any], address: str) -> None:
    """Binds the socket that the engine process connects to. Where ZeroMQ lacks sockets in folders, as on Windows, it is
    a local TCP port, and a private file in the folder has its address and a key."""
    if zmq.has("ipc"):
        socket.bind(address)
        return
    public, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_server = True
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    engine_file(address, SOCKET).write_text(f"tcp://127.0.0.1:{port} {public.decode()}")


def connect(socket: zmq.Socket[bytes], address: str) -> None:
    if zmq.has("ipc"):
        socket.connect(address)
        return
    endpoint, server = engine_file(address, SOCKET).read_text().split()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = server.encode()
    socket.connect(endpoint)


class EngineMemory:
    """Holds memory that an engine process writes to and that outlives it. If possible it is anonymous, since writing a
    file to a disk could delay a step; the folder then has a link to it."""

    def __init__(self, address: str, name: str, size: int) -> None:
        path = engine_file(address, name)
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create(f"penstock-{name}")
            path.symlink_to(f"/proc/{os.getpid()}/fd/{self._file}")
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self._file, size)
        self.memory = mmap.mmap(self._file, size)

    def close(self) -> None:
        """Gives the memory back. Two may end an engine at once, and the number of a closed file may be another's."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def open_memory(address: str, name: str, size: int) -> mmap.mmap:
    with engine_file(address, name).open("r+b") as file:
        return mmap.mmap(file.fileno(), size)
