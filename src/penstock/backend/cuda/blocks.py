"""Copies KV blocks on a GPU, and from there to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from penstock.backend.cuda.kv_cache import LayerCache, copy_blocks, export_blocks, import_blocks
from penstock.backend.cuda.launchers import Memory


class CudaBlocks:
    """Implements BlockMemory over the caches of a program."""

    def __init__(
        self, memory: Memory, device: torch.device, on_stream: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._memory = memory
        self._device = device
        self._on_stream = on_stream  # the stream that steps are queued on

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        with self._on_stream():
            copy_blocks(self._caches(), *(self._index(column) for column in zip(*pairs, strict=True)))

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        with self._on_stream():
            return export_blocks(self._caches(), self._index(blocks))

    def import_blocks(self, blocks: Sequence[int], data: bytes) -> None:
        with self._on_stream():
            import_blocks(self._caches(), self._index(blocks), data)

    def fingerprint(self) -> str:
        groups = max(self._memory.groups.values(), default=0) + 1
        shapes = " ".join(f"{part.dtype}{list(part.shape[1:])}" for part in self._parts())
        return f"cuda 1, {groups} groups, blocks of {shapes}"

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all blocks."""
        return sum(int(part.nbytes) for part in self._parts())

    def _parts(self) -> list[Any]:
        return [part for cache in self._caches() for part in cache if part is not None]

    def _index(self, blocks: Sequence[int]) -> Any:
        return torch.tensor(blocks, device=self._device)

    def _caches(self) -> list[LayerCache]:
        """Returns what blocks consist of."""
        return self._memory.planes
