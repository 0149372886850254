"""Keeps copies of KV blocks in host memory and carries out the copies of plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from penstock.backend.base import BlockMemory
from penstock.errors import StepFailed
from penstock.types import BlockCopy


class HostBlocks:
    """Stores the bytes of blocks by place."""

    def __init__(self) -> None:
        self._stored: dict[int, bytes] = {}

    def carry_out(self, copies: Sequence[BlockCopy], memory: BlockMemory) -> None:
        """Copies blocks in and out, in order; neighbours in one direction go together."""
        for direction, group in groupby(copies, key=lambda copy: copy.direction):
            run = list(group)
            if direction == "out":
                self._copy_out(run, memory)
            else:
                self._copy_in(run, memory)

    def _copy_out(self, copies: Sequence[BlockCopy], memory: BlockMemory) -> None:
        data = memory.export_blocks([copy.block for copy in copies])
        size = len(data) // len(copies)
        for index, copy in enumerate(copies):
            self._stored[copy.place] = data[index * size : (index + 1) * size]

    def _copy_in(self, copies: Sequence[BlockCopy], memory: BlockMemory) -> None:
        missing = [copy.place for copy in copies if copy.place not in self._stored]
        if missing:
            raise StepFailed(f"KV blocks cannot be copied in: nothing was copied out to places {missing}")
        data = b"".join(self._stored[copy.place] for copy in copies)
        memory.import_blocks([copy.block for copy in copies], data)
