"""Copies blocks from where another engine of this machine has staged them straight to the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.backend.blocks.rows import BlockRows
from penstock.engine.kv_disk.loading import Targets
from penstock.engine.kv_disk.segment import block_crc
from penstock.engine.kv_transfer.carrier import OfferSource
from penstock.engine.kv_transfer.direct_reader import DirectReader, FilledPart
from penstock.engine.kv_transfer.reader import STALE
from penstock.engine.kv_transfer.shm import ShmSource, is_here
from penstock.engine.kv_transfer.wire import BlockPart, TransferRefused
from penstock.types import BlockOffer

WANTED = memoryview(b"")  # stands for memory that a block would be read into


class MappedReader(DirectReader):
    """Reads the headers of blocks, and copies those from memory that both engines have mapped: see DirectReader."""

    def __init__(
        self, offer: BlockOffer, first: int, count: int, groups: int, block_bytes: int, rows: BlockRows
    ) -> None:
        super().__init__(offer, first, count, groups, block_bytes)
        self._rows = rows

    def targets(self, wanted: Sequence[Sequence[bool]]) -> list[Targets]:
        return [[WANTED if want else None for want in groups] for groups in wanted]

    def _connect(self) -> OfferSource:
        return ShmSource(self._offer.addresses[0].partition(":")[2])

    def _read_part(self, source: OfferSource, hash: bytes, part: BlockPart, target: memoryview | None) -> None:
        if self._mapped.rows.shape[1] != self._block_bytes:
            raise ValueError(f"blocks have {self._block_bytes} bytes; got {self._mapped.rows.shape[1]}")
        if self._generation(part.place) != part.generation:
            raise TransferRefused(STALE)

    def _copy(self, parts: Sequence[FilledPart]) -> list[int]:
        places = [each.part.place for each in parts]
        starts = [block_crc(each.hash, b"") for each in parts]
        return self._rows.copy_in([each.block for each in parts], self._mapped.rows, places, starts)

    def _generation(self, place: int) -> int:
        return self._mapped.generation(place)

    @property
    def _mapped(self) -> ShmSource:
        assert isinstance(self._source, ShmSource)
        return self._source


def can_map(offer: BlockOffer) -> bool:
    return bool(offer.addresses) and is_here(offer.addresses[0])
