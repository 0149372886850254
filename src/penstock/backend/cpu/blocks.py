"""Copies KV blocks and recurrent states of native programs, and to the host and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import HostRoom
from penstock.backend.blocks.host_room import PlainRoom
from penstock.backend.blocks.rows import Rows
from penstock.backend.cpu import _native

if TYPE_CHECKING:
    from penstock.backend.cpu.backend import CpuProgram


class NativeBlocks:
    """Copies KV blocks of the native caches: see BlockMemory and BlockRows."""

    def __init__(self, programs: Mapping[int, CpuProgram], hidden: _native.HiddenRows) -> None:
        self._programs = programs
        self._hidden = hidden

    @property
    def _stored(self) -> list[_native.Program | _native.HiddenRows]:
        hidden = [self._hidden] if self._hidden.block_bytes else []
        return [*(program.native for program in self._programs.values()), *hidden]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for each in self._stored:
            each.copy_blocks(list(pairs))

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        parts = [each.export_blocks(list(blocks)) for each in self._stored]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([_by_block(part, len(blocks)) for part in parts], axis=1).tobytes()

    def import_blocks(self, blocks: Sequence[int], data: bytes | memoryview) -> None:
        stored = self._stored
        size = sum(each.block_bytes for each in stored)
        if len(data) != size * len(blocks):
            raise ValueError(f"{len(blocks)} KV blocks take {size * len(blocks)} bytes; got {len(data)}")
        if len(stored) == 1:
            return stored[0].import_blocks(list(blocks), data)
        ends = np.cumsum([each.block_bytes for each in stored])
        parts = np.split(_by_block(data, len(blocks)), ends[:-1], axis=1)
        for each, part in zip(stored, parts, strict=True):
            each.import_blocks(list(blocks), part.tobytes())

    def copy_out(self, blocks: Sequence[int], rows: Rows, places: Sequence[int], crcs: Sequence[int] = ()) -> list[int]:
        found, offset = list(crcs), 0
        for each in self._stored:
            found = each.copy_out(list(blocks), rows, list(places), offset, found)
            offset += each.block_bytes
        return found

    def copy_in(self, blocks: Sequence[int], rows: Rows, places: Sequence[int], crcs: Sequence[int] = ()) -> list[int]:
        found, offset = list(crcs), 0
        for each in self._stored:
            found = each.copy_in(list(blocks), rows, list(places), offset, found)
            offset += each.block_bytes
        return found

    def host_room(self, places: int) -> HostRoom:
        return PlainRoom(self, places)

    def touch_blocks(self, blocks: Sequence[int]) -> None:
        zeros = {each.block_bytes: bytes(each.block_bytes) for each in self._stored}
        for each in self._stored:
            for block in blocks:
                each.import_blocks([block], zeros[each.block_bytes])

    def fingerprint(self) -> str:
        return "; ".join(["cpu 2", *(each.kv_layout for each in self._stored)])


class NativeStates:
    """Copies recurrent states of the one program that has any, each as if it were a block: see BlockMemory."""

    def __init__(self, programs: Mapping[int, CpuProgram]) -> None:
        self._programs = programs

    @property
    def _native(self) -> _native.Program:
        return self._programs[0].native

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.import_blocks([target], self.export_blocks([source]))

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        return self._native.export_states(list(blocks))

    def import_blocks(self, blocks: Sequence[int], data: bytes | memoryview) -> None:
        self._native.import_states(list(blocks), data)

    def host_room(self, places: int) -> HostRoom:
        return PlainRoom(self, places)

    def touch_blocks(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.import_blocks([block], bytes(self._native.state_bytes))

    def fingerprint(self) -> str:
        return f"cpu 1; {self._native.state_layout}"


def _by_block(data: bytes | memoryview, blocks: int) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).reshape(blocks, -1)
