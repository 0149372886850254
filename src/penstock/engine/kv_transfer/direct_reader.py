"""Copies offered blocks to the KV cache without host memory between the two, and verifies the copies."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from penstock.engine.kv_disk.loading import Targets
from penstock.engine.kv_transfer.reader import DAMAGED, LOST, STALE, OfferReader
from penstock.engine.kv_transfer.wire import BlockPart

log = logging.getLogger(__name__)


class FilledPart(NamedTuple):
    """Is a layer group's block that is copied to a block of the device."""

    at: int  # the block's number, from the first that is copied on
    hash: bytes
    part: BlockPart
    block: int


class DirectReader(OfferReader, ABC):
    """Reads and verifies the headers of an offer's blocks, in any thread; then `fill` copies the blocks to the KV
    cache, without host memory between the two."""

    stays_open = True

    def fill(self, blocks: Sequence[Sequence[int]], skipped: int = 0) -> int:
        """Copies the blocks that were read, but the first few, to blocks of the device, for each layer group (-1: not
        wanted). Returns how many, from the first on, are as offered; if not all are, `reason` is set. For the engine's
        thread."""
        parts = [
            FilledPart(at, header.hash, part, block)
            for at, (each, header) in enumerate(zip(blocks, self.headers[skipped:], strict=False))
            for part, block in zip(header.parts, each, strict=True)
            if block >= 0
        ]
        try:
            crcs = self._copy(parts)
        except (OSError, IndexError, ValueError, RuntimeError) as error:
            log.warning("offered KV blocks cannot be copied: %s", error)
            self.reason = LOST
            return 0
        for (at, _, part, _), crc in zip(parts, crcs, strict=True):
            stale = self._generation(part.place) != part.generation
            if stale or crc != part.crc:
                self.reason = STALE if stale else DAMAGED
                return at
        return len(blocks)

    @abstractmethod
    def targets(self, wanted: Sequence[Sequence[bool]]) -> list[Targets]:
        """Returns memory for the headers of blocks, by layer group, where these are wanted."""

    @abstractmethod
    def _copy(self, parts: Sequence[FilledPart]) -> list[int]: ...

    @abstractmethod
    def _generation(self, place: int) -> int: ...
