"""Names the files in the folder that a client shares with its engine process: the socket, the flight record and the
stacks of a process that has died."""

from __future__ import annotations

import mmap
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


def make_flight(address: str) -> mmap.mmap:
    """Makes the memory for an engine's flight record, and returns it. It outlives the engine process."""
    with engine_file(address, FLIGHT).open("xb") as file:
        file.truncate(RECORD_BYTES)
    return open_flight(address)


def open_flight(address: str) -> mmap.mmap:
    """Returns the memory of an engine's flight record."""
    with engine_file(address, FLIGHT).open("r+b") as file:
        return mmap.mmap(file.fileno(), RECORD_BYTES)
