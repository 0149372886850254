"""Copies KV blocks and recurrent states on a GPU, and from there to the host and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from penstock.backend.base import HostRoom
from penstock.backend.blocks.host_room import PlainRoom
from penstock.backend.cuda.hidden_states import HiddenStates
from penstock.backend.cuda.kv_cache import LayerCache, copy_blocks, export_blocks, import_blocks
from penstock.backend.cuda.loaded_program import LoadedProgram
from penstock.backend.cuda.pinned_room import STAGED, PinnedRoom
from penstock.backend.cuda.sharing import KvRows


class CudaMemory(ABC):
    """Implements BlockMemory over arrays on the device: a block has a row in each of them. `fixed`: blocks hold what
    does not depend on the batch that they were computed in."""

    STAGED = STAGED  # bytes on the device that blocks pass through on their way to host memory

    def __init__(
        self,
        programs: Mapping[int, LoadedProgram],
        device: torch.device,
        on_stream: Callable[[], AbstractContextManager[Any]],
        *,
        fixed: bool = False,
    ) -> None:
        self._programs = programs
        self._device = device
        self._on_stream = on_stream  # the stream that steps are queued on
        self._fixed = fixed

    def fingerprint(self) -> str:
        return f"cuda 1, {'; '.join([*self._layouts(), *(['deterministic'] if self._fixed else [])])}"

    @abstractmethod
    def _caches(self) -> list[LayerCache]: ...

    @abstractmethod
    def _layouts(self) -> list[str]: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        with self._on_stream():
            copy_blocks(self._caches(), *(self._index(column) for column in zip(*pairs, strict=True)))

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        with self._on_stream():
            return export_blocks(self._caches(), self._index(blocks))

    def import_blocks(self, blocks: Sequence[int], data: bytes | memoryview) -> None:
        with self._on_stream():
            import_blocks(self._caches(), self._index(blocks), data)

    def host_room(self, places: int) -> HostRoom:
        if self._device.type != "cuda":
            return PlainRoom(self, places)
        return PinnedRoom(self._by_block(), places, self._on_stream, self.STAGED)

    def touch_blocks(self, blocks: Sequence[int]) -> None:  # noqa: B027
        """Does nothing: the memory of a GPU is there once it is reserved."""

    @property
    def nbytes(self) -> int:
        return sum(int(part.nbytes) for part in parts_of(self._caches()))

    def _by_block(self) -> list[Any]:
        return [data for cache in self._caches() for data in cache.by_block()]

    def _index(self, blocks: Sequence[int]) -> Any:
        return torch.tensor(blocks, device=self._device)


class CudaBlocks(CudaMemory):
    """Copies KV blocks: the caches of all programs, and what they store for each other."""

    def __init__(
        self,
        programs: Mapping[int, LoadedProgram],
        hidden: HiddenStates,
        device: torch.device,
        on_stream: Callable[[], AbstractContextManager[Any]],
        *,
        fixed: bool = False,
    ) -> None:
        super().__init__(programs, device, on_stream, fixed=fixed)
        self._hidden = hidden

    def rows(self) -> KvRows:
        return KvRows(self._by_block(), self._device, self._on_stream)

    def _layouts(self) -> list[str]:
        layouts = [
            f"{program.groups} groups, blocks of {shapes_of(program.memory.kv.planes)}"
            for program in self._programs.values()
        ]
        hidden = [f"hidden states of {shapes_of(planes)}"] if (planes := self._hidden.planes) else []
        return [*layouts, *hidden]

    def _caches(self) -> list[LayerCache]:
        """Returns the parts of blocks: of each program, then hidden states."""
        kv = [cache for program in self._programs.values() for cache in program.memory.kv.planes]
        return [*kv, *self._hidden.planes]


class CudaStates(CudaMemory):
    """Copies the recurrent states of all programs, each as if it were a block."""

    STAGED = 0  # one in each buffer: a state is large, and few travel

    def _layouts(self) -> list[str]:
        return [f"states of {shapes_of(self._caches())}"]

    def _caches(self) -> list[LayerCache]:
        layers = [each for program in self._programs.values() for each in program.memory.states.layers.values()]
        return [LayerCache(layer, None) for layer in layers]


def parts_of(caches: Sequence[LayerCache]) -> list[Any]:
    return [part for cache in caches for part in cache.parts()]


def shapes_of(caches: Sequence[LayerCache]) -> str:
    return " ".join(f"{part.dtype}{list(part.shape[1:])}" for part in parts_of(caches))
