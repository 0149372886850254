"""Puts a GPU's model to sleep: its memory is given back, and its kernels, tilings and graphs stay."""

from __future__ import annotations

from typing import Any

import torch

from penstock.backend.cuda.arena import Arena, release_cached
from penstock.backend.cuda.transfer import Transfer
from penstock.errors import OutOfMemory

LAST_MEMORY = 128 << 20  # bytes


class LastMemory:
    """Holds some memory of a GPU until a step finds none: kernels that are loaded then need some."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: Any | None = None

    def hold(self) -> None:
        """Takes the memory, unless it is taken already or there is little."""
        if self._device.type != "cuda" or self._held is not None:
            return
        if torch.cuda.mem_get_info(self._device)[0] > 2 * LAST_MEMORY:
            self._held = torch.empty(LAST_MEMORY, dtype=torch.uint8, device=self._device)

    def give_back(self) -> None:
        self._held = None


class CudaSleeper:
    """Implements Sleeper: what the arena holds leaves the device, and what torch has cached."""

    def __init__(self, arena: Arena, transfer: Transfer, last: LastMemory) -> None:
        self._arena = arena
        self._transfer = transfer  # weights may still be on their way
        self._last = last

    @classmethod
    def of(cls, arena: Arena, transfer: Transfer, last: LastMemory) -> CudaSleeper | None:
        """Returns a sleeper for the arena's model; None if its memory cannot be given back."""
        return cls(arena, transfer, last) if arena.can_sleep else None

    def sleep(self) -> int:
        self._transfer.finish()
        if self._arena.keeper is not None:
            self._arena.keeper.withdraw()  # the device has its memory back only if nobody holds it
        try:
            self._arena.sleep()
        except OutOfMemory:
            self._keep()
            raise
        self._last.give_back()
        release_cached(self._arena.device)
        return self._arena.host_bytes

    def wake(self) -> None:
        self._arena.wake()
        self._keep()

    def _keep(self) -> None:
        if self._arena.keeper is not None:
            self._arena.keeper.keep()
