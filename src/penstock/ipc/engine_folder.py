"""Names the files in the folder that a client shares with its engine process: the socket, the flight record and the
stacks of a process that has died."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from penstock.engine.flight_recorder import RECORD_BYTES

SCHEME = "ipc://"
SOCKET, FLIGHT, STACK = "engine", "flight", "stack"


def address_in(folder: str) -> str:
    """Returns the address of the socket in an engine's folder."""
    return f"{SCHEME}{folder}/{SOCKET}"


def engine_file(address: str, name: str) -> Path:
    """Returns the path of a file beside an engine's socket."""
    return Path(address.removeprefix(SCHEME)).parent / name


class FlightMemory:
    """Holds the memory of an engine's flight record, which outlives the engine process. Where that is possible it is no
    file of a disk, whose writing could hold up a step; the folder then has a link to it."""

    def __init__(self, address: str) -> None:
        path = engine_file(address, FLIGHT)
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("penstock-flight")
            path.symlink_to(f"/proc/{os.getpid()}/fd/{self._file}")
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self._file, RECORD_BYTES)
        self.memory = mmap.mmap(self._file, RECORD_BYTES)

    def close(self) -> None:
        os.close(self._file)


def open_flight(address: str) -> mmap.mmap:
    """Returns the memory of an engine's flight record."""
    with engine_file(address, FLIGHT).open("r+b") as file:
        return mmap.mmap(file.fileno(), RECORD_BYTES)
