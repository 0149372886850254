"""Carries blocks with NIXL, where that is installed: readers fetch them from registered memory by one-sided reads. On
RDMA networks these take no time of the offering engine.

A reader asks for its blocks over a TCP connection, as with tcp.py:

engine how to connect to its agent, before any request: a reader that cannot connect uses another carrier reader its
request engine status and layout; where generations and blocks begin; the key to that memory; then headers of blocks

A reader that was admitted once can read all of the staging memory, as with shm.py, and nothing is encrypted.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from penstock.engine.kv_transfer.carrier import welcome_of
from penstock.engine.kv_transfer.staging import StagedBlocks
from penstock.engine.kv_transfer.tcp import TcpListener, TcpSource
from penstock.engine.kv_transfer.wire import GENERATION, REPLY, SECONDS, BlockPart, receive

log = logging.getLogger(__name__)
SCHEME = "nixl"
RDMA_DEVICES = Path("/sys/class/infiniband")
METADATA = Struct("<I")  # bytes of metadata that follow
LAYOUT = Struct("<QQ")  # addresses of the first generation and of the first block
LARGEST = 1 << 20  # bytes of metadata
PUMPED = 1e-4  # seconds between two looks at what readers ask of an agent
SPUN = 2e-4  # seconds that a reader looks again at once
REMEMBERED = 8  # agents that stay connected
HOST = "DRAM"  # NIXL's word for memory of the host


def installed() -> bool:
    return find_spec("nixl") is not None


def preferable() -> bool:
    """Returns whether blocks should travel to other machines with NIXL: without RDMA, one-sided reads are emulated, and
    plain TCP is faster. One that does not start is logged."""
    if not installed() or not (RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())):
        return False
    try:
        new_agent()
    except OSError as error:
        log.warning("KV blocks are offered without NIXL, which is installed and does not start: %s", error)
        return False
    return True


def new_agent() -> Any:
    """Returns an agent that makes progress when it is asked to: NIXL's own thread for that takes a whole core. Raises
    OSError if NIXL is not installed or does not start."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    with _as_os_errors():
        from nixl import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        mode = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=mode)
        return nixl_agent(f"penstock-{os.getpid()}-{os.urandom(8).hex()}", config)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raises OSError for any error of NIXL: its errors have nothing in common."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"NIXL: {error!r}") from error


class NixlListener(TcpListener):
    """Listens on a host and port, 0 for any: see Listener. Readers may fetch what the `staging` memory holds."""

    sends_contents = False

    def __init__(self, host: str, port: int, staging: StagedBlocks) -> None:
        self._agent = new_agent()
        with _as_os_errors():
            how_to_connect = self._agent.get_agent_metadata()  # nothing is registered yet: no keys exist
            generations, blocks, size = staging.addresses
            self._region = self._agent.register_memory([(generations, size, 0, "")], HOST)
            key = self._agent.get_partial_agent_metadata(self._region)
        super().__init__(host, port)
        self.address = f"{SCHEME}:{host}:{self.address.rpartition(':')[2]}"
        self._hello = METADATA.pack(len(how_to_connect)) + how_to_connect
        self._layout = LAYOUT.pack(generations, blocks) + METADATA.pack(len(key)) + key
        self._readers = 0
        self._some = threading.Condition()  # reads
        self._closed = False
        threading.Thread(target=self._pump, name="penstock-nixl", daemon=True).start()
        _shared_reader()  # who offers is likely to read, and would be waited for then

    def accept(self) -> socket.socket:
        connection = super().accept()
        with suppress(OSError):  # one that has gone already is noticed later
            connection.sendall(self._hello)
        return connection

    @contextmanager
    def serving(self) -> Iterator[None]:
        with self._some:
            self._readers += 1
            self._some.notify()
        try:
            yield
        finally:
            with self._some:
                self._readers -= 1

    def welcome(self, connection: socket.socket, staging: StagedBlocks) -> None:
        connection.sendall(welcome_of(staging) + self._layout)

    def send(self, connection: socket.socket, staging: StagedBlocks, part: BlockPart) -> None: ...

    def close(self) -> None:
        with self._some:
            self._closed = True
            self._some.notify()
        super().close()

    def _pump(self) -> None:
        """Drives the agent's progress while somebody reads, and frees its memory in the end."""
        while True:
            with self._some:
                self._some.wait_for(lambda: self._readers or self._closed)
                if self._closed:
                    break
            with suppress(OSError), _as_os_errors():
                self._agent.get_new_notifs()
            time.sleep(PUMPED)
        with suppress(OSError), _as_os_errors():
            self._agent.deregister_memory(self._region)


class Landing:
    """Is registered memory that one block and one generation are fetched to. The reader's own target memory may be
    given back to the system at any time, so it cannot be registered itself."""

    def __init__(self, agent: Any, block_bytes: int) -> None:
        self.block = np.empty(block_bytes, np.uint8)
        self.generation = np.zeros(GENERATION.size, np.uint8)
        for array in (self.block, self.generation):
            agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], HOST)


class NixlReader:
    """Fetches blocks for all threads of this process."""

    def __init__(self) -> None:
        self.agent = new_agent()
        self._connected: OrderedDict[bytes, str] = OrderedDict()  # names of agents, by how to connect to them
        self._landings: dict[int, list[Landing]] = {}  # unused ones, by bytes of a block
        self._lock = threading.Lock()

    def connect(self, metadata: bytes) -> str:
        """Returns the name of an agent once it is connected to; raises OSError if it cannot be."""
        with self._lock, _as_os_errors():
            if metadata not in self._connected:
                self._connected[metadata] = self._add(metadata)
                if len(self._connected) > REMEMBERED:
                    self.agent.remove_remote_agent(self._connected.popitem(last=False)[1])
            self._connected.move_to_end(metadata)
            return self._connected[metadata]

    def learn(self, key: bytes) -> None:
        with self._lock, _as_os_errors():
            self._add(key)

    def forget(self, name: str) -> None:
        with self._lock, suppress(OSError), _as_os_errors():
            self._connected = OrderedDict(each for each in self._connected.items() if each[1] != name)
            self.agent.remove_remote_agent(name)

    def take(self, block_bytes: int) -> Landing:
        with self._lock, _as_os_errors():
            free = self._landings.setdefault(block_bytes, [])
            return free.pop() if free else Landing(self.agent, block_bytes)

    def give_back(self, landing: Landing) -> None:
        with self._lock:
            self._landings[landing.block.nbytes].append(landing)

    def fetch(self, name: str, address: int, target: Any) -> None:
        """Fills registered memory with bytes from an address of another agent; raises OSError if that fails or takes
        too long."""
        with _as_os_errors():
            here = self.agent.get_xfer_descs([(target.ctypes.data, target.nbytes, 0)], HOST)
            there = self.agent.get_xfer_descs([(address, target.nbytes, 0)], HOST)
            handle = self.agent.initialize_xfer("READ", here, there, name)
            try:
                self._wait(handle)
            finally:
                self.agent.release_xfer_handle(handle)

    def _wait(self, handle: Any) -> None:
        began, state = time.monotonic(), self.agent.transfer(handle)
        while state == "PROC":
            elapsed = time.monotonic() - began
            if elapsed > SECONDS:
                raise TimeoutError("the other engine's memory does not answer")
            if elapsed > SPUN:
                time.sleep(PUMPED)
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise ConnectionError(f"the transfer ended with {state}")

    def _add(self, metadata: bytes) -> str:
        name = self.agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)


_reader: NixlReader | None = None
_opening = threading.Lock()


def _shared_reader() -> NixlReader:
    """Returns this process's reader; the first call takes half a second."""
    global _reader
    with _opening:
        _reader = _reader or NixlReader()
        return _reader


class NixlSource(TcpSource):
    """Fetches blocks from where they are staged: see OfferSource. Raises OSError if the engine does not exist or NIXL
    cannot reach it."""

    scheme = SCHEME

    def __init__(self, rest: str) -> None:
        self._reader = _shared_reader()
        super().__init__(rest)
        self._landing: Landing | None = None
        try:
            self._name = self._reader.connect(self._receive_metadata())
        except OSError:
            self.connection.close()
            raise

    def enter(self) -> int:
        status, self._places, self._block_bytes = REPLY.unpack(receive(self.connection, REPLY.size))
        if not status:
            self._generations, self._blocks = LAYOUT.unpack(receive(self.connection, LAYOUT.size))
            self._reader.learn(self._receive_metadata())
            self._landing = self._reader.take(self._block_bytes)
        return int(status)

    def read(self, part: BlockPart, target: memoryview) -> bool:
        landing = self._landing
        if landing is None or not part.place < self._places or len(target) != self._block_bytes:
            raise IndexError(f"place {part.place} is not among {self._places} of {self._block_bytes} bytes")
        try:
            if self._generation(landing, part.place) != part.generation:
                return False
            self._reader.fetch(self._name, self._blocks + part.place * self._block_bytes, landing.block)
            target[:] = landing.block.data
            return self._generation(landing, part.place) == part.generation
        except OSError:
            self._landing = None  # something may still arrive there
            self._reader.forget(self._name)
            raise

    def close(self) -> None:
        if self._landing is not None:
            self._reader.give_back(self._landing)
            self._landing = None
        super().close()

    def _generation(self, landing: Landing, place: int) -> int:
        self._reader.fetch(self._name, self._generations + place * GENERATION.size, landing.generation)
        return int(GENERATION.unpack(landing.generation.data)[0])

    def _receive_metadata(self) -> bytes:
        (size,) = METADATA.unpack(receive(self.connection, METADATA.size))
        if size > LARGEST:
            raise ConnectionError(f"an agent's metadata has at most {LARGEST} bytes; got {size}")
        return receive(self.connection, size)
