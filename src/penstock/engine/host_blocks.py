"""Keeps copies of KV blocks in host memory, carries out the copies of plans and measures how long they take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import BlockMemory
from penstock.core.tiers import CopyCosts
from penstock.errors import StepFailed
from penstock.types import BlockCopy, Limits

CHUNK = 4 << 20  # bytes that are copied in at once: more would not stay in a processor's cache on their way
PROBED = 4  # blocks that are copied at first, to know what that costs


class HostBlocks:
    """Stores the bytes of blocks in places, of which memory is taken as they are written. `costs` learn how long copies
    from and to `memory` take, of which no block is in use yet."""

    def __init__(self, limits: Limits, memory: BlockMemory, costs: CopyCosts) -> None:
        self.block_bytes = len(memory.export_blocks([0]))
        self._places = limits.host_places
        self._memory = memory
        self._costs = costs
        self.release()
        self._probe(range(min(PROBED, limits.num_blocks)))

    def carry_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks in and out, in order; neighbours in one direction go together."""
        for direction, group in groupby(copies, key=lambda copy: copy.direction):
            run, began = list(group), time.perf_counter()
            if direction == "out":
                self._copy_out(run)
            else:
                self._copy_in(run)
            self._costs.observe(direction, len(run), time.perf_counter() - began)

    def write(self, place: int, data: bytes | memoryview) -> None:
        """Puts the bytes of a block in a place."""
        self._room()[place] = np.frombuffer(data, np.uint8)
        self._written[place] = 1

    def fill(self, place: int) -> memoryview:
        """Returns the memory of a reserved place for whoever writes a block's bytes there, in any thread, before the
        place is used."""
        self._written[place] = 1
        return memoryview(self._room()[place])

    def read(self, place: int) -> memoryview:
        """Returns the bytes in a place, which the next copy to it changes."""
        return memoryview(self._room()[place])

    def release(self) -> None:
        """Forgets what all places hold and gives their memory back."""
        self._stored: NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        self._written = bytearray(self._places)

    def _room(self) -> NDArray[np.uint8]:
        """Returns the places. The system backs them with memory when they are first written."""
        if not self._stored.size:
            self._stored = np.empty((self._places, self.block_bytes), np.uint8)
        return self._stored

    def _copy_out(self, copies: Sequence[BlockCopy]) -> None:
        data = self._memory.export_blocks([copy.block for copy in copies])
        blocks = np.frombuffer(data, np.uint8).reshape(len(copies), -1)
        room = self._room()
        for copy, block in zip(copies, blocks, strict=True):
            room[copy.place] = block
            self._written[copy.place] = 1

    def _copy_in(self, copies: Sequence[BlockCopy]) -> None:
        places = [copy.place for copy in copies]
        missing = [place for place in places if not self._written[place]]
        if missing:
            raise StepFailed(f"KV blocks cannot be copied in: nothing was copied out to places {missing}")
        room, few = self._room(), max(CHUNK // self.block_bytes, 1)
        for at in range(0, len(copies), few):
            data = b"".join(memoryview(room[place]) for place in places[at : at + few])
            self._memory.import_blocks([copy.block for copy in copies[at : at + few]], data)

    def _probe(self, blocks: Sequence[int]) -> None:
        """Measures a copy out and in of some blocks, whose memory was touched before."""
        self._memory.import_blocks(blocks, self._memory.export_blocks(blocks))
        began = time.perf_counter()
        data = self._memory.export_blocks(blocks)
        middle = time.perf_counter()
        self._memory.import_blocks(blocks, data)
        self._costs.observe("out", len(blocks), middle - began)
        self._costs.observe("in", len(blocks), time.perf_counter() - middle)
