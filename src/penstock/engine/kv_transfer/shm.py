"""Carries blocks through memory that both processes map: the reader is given the file over a Unix socket.

The socket has a name outside the file system, which ends with its process, and accepts the same user only.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from penstock.engine.kv_transfer.carrier import welcome_of
from penstock.engine.kv_transfer.staging import StagedBlocks, StagedMap
from penstock.engine.kv_transfer.wire import REPLY, SECONDS, BlockPart, receive

SCHEME = "shm"
CREDENTIALS = Struct("3i")  # pid, user, group: struct ucred
MAPPED = 8  # files that stay mapped: to map one anew costs a page fault for each page

_maps: dict[tuple[int, int], StagedMap] = {}  # keys: device and inode of the file
_mapping = threading.Lock()  # several threads read offers


class ShmListener:
    """Listens on a Unix socket: see Listener."""

    sends_contents = False

    def __init__(self) -> None:
        name = f"{here()}.penstock-{os.getpid()}-{os.urandom(4).hex()}"
        self.address = f"{SCHEME}:{name}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{name}")
        self._socket.listen()

    def accept(self) -> socket.socket:
        while True:
            connection, _ = self._socket.accept()
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            if CREDENTIALS.unpack(credentials)[1] == os.getuid():
                return connection
            connection.close()

    def serving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def welcome(self, connection: socket.socket, staging: StagedBlocks) -> None:
        socket.send_fds(connection, [welcome_of(staging)], [staging.file])

    def send(self, connection: socket.socket, staging: StagedBlocks, part: BlockPart) -> None: ...

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class ShmSource:
    """Reads blocks where they are staged: see OfferSource. Raises OSError if the engine does not exist."""

    scheme = SCHEME

    def __init__(self, rest: str) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(SECONDS)
        self.connection.connect(f"\0{rest}")
        self._map: StagedMap | None = None

    def enter(self) -> int:
        data, files, _, _ = socket.recv_fds(self.connection, REPLY.size, 1)
        try:
            data += receive(self.connection, REPLY.size - len(data))
            status, places, block_bytes = REPLY.unpack(data)
            if files:
                self._map = _mapped(files[0], places, block_bytes)
        finally:
            for file in files:
                os.close(file)
        return int(status)

    def read(self, part: BlockPart, target: memoryview) -> bool:
        assert self._map is not None
        if self.generation(part.place) != part.generation:
            return False
        target[:] = self._map.block(part.place)
        return self.generation(part.place) == part.generation

    @property
    def rows(self) -> NDArray[np.uint8]:
        assert self._map is not None
        return self._map.blocks

    def generation(self, place: int) -> int:
        assert self._map is not None
        return int(self._map.generations[place])

    def close(self) -> None:
        self.connection.close()


@cache
def here() -> str:
    """Names this machine since it was started, and the network in which its sockets can be found; empty: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def is_here(address: str) -> bool:
    return bool(here()) and address.startswith(f"{SCHEME}:{here()}.")


def _mapped(file: int, places: int, block_bytes: int) -> StagedMap:
    """Returns a file mapped for reading. The last few stay mapped."""
    found = os.fstat(file)
    key = found.st_dev, found.st_ino
    with _mapping:
        if key not in _maps:
            if len(_maps) >= MAPPED:
                _maps.pop(next(iter(_maps)))
            _maps[key] = StagedMap(file, places, block_bytes)
        return _maps[key]
