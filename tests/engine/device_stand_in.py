"""Stands for a device whose memory processes share: files in shared memory, and blocks as a backend exports them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from penstock.backend.base import BlockMemory
from penstock.backend.blocks.checksum import block_checksums

FOLDER = "/dev/shm"


class StandInRoom:
    """Is room on the stand-in, taken or opened: see SharedRoom and OpenedRoom."""

    def __init__(self, memory: BlockMemory, file: Any, places: int) -> None:
        self._memory = memory
        self.places = places
        size = len(memory.export_blocks([0]))
        self.handle = os.fsencode(file.name)
        os.ftruncate(file.fileno(), places * size)
        self._file = file
        self.array = np.frombuffer(mmap.mmap(file.fileno(), places * size), np.uint8).reshape(places, size)
        self.closed = False

    def write(self, blocks: Sequence[int], places: Sequence[int]) -> list[int]:
        data = np.frombuffer(self._memory.export_blocks(blocks), np.uint8).reshape(len(blocks), -1)
        self.array[list(places)] = data
        return block_checksums(data)

    def read(self, places: Sequence[int], blocks: Sequence[int]) -> list[int]:
        data = self.array[list(places)]
        self._memory.import_blocks(blocks, data.tobytes())
        return block_checksums(data)

    def close(self) -> None:
        assert not self.closed, "it was closed before"
        self.closed = True
        self._file.close()


class StandInSharing:
    """Implements DeviceSharing, with room for at most so many blocks."""

    def __init__(self, memory: BlockMemory, name: str = "GPU-0", room: int = 1 << 20) -> None:
        self.name = name
        self.rooms: list[StandInRoom] = []
        self._memory = memory
        self._room = room

    def share(self, places: int) -> StandInRoom:
        if not self._room:
            raise OSError("there is no memory")
        self.rooms.append(StandInRoom(self._memory, NamedTemporaryFile(dir=FOLDER), min(places, self._room)))  # noqa: SIM115
        return self.rooms[-1]

    def open(self, handle: bytes) -> StandInRoom:
        file = open(handle, "r+b")  # noqa: SIM115
        places = os.fstat(file.fileno()).st_size // len(self._memory.export_blocks([0]))
        self.rooms.append(StandInRoom(self._memory, file, places))
        return self.rooms[-1]
