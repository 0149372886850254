"""Reads blocks that another engine offers, and verifies each before and after it is copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from penstock.engine.kv_disk.loading import Targets
from penstock.engine.kv_disk.segment import block_crc
from penstock.engine.kv_transfer.carrier import OfferSource
from penstock.engine.kv_transfer.wire import (
    DONE,
    FOREIGN,
    MAGIC,
    REQUEST,
    STATUS,
    BlockHeader,
    BlockPart,
    TransferRefused,
    header_struct,
    receive,
)
from penstock.types import BlockOffer

UNREACHABLE, LOST, OTHER_BLOCK, STALE, DAMAGED = "unreachable", "lost", "other_block", "stale", "damaged"


class WantedBlock(NamedTuple):
    """Describes a block that a reader expects."""

    hash: bytes
    parent: bytes
    tokens: bytes


class OfferReader:
    """Reads `count` blocks of an offer, from its block `first` on, in order: see ChainReader. At the first wrong block,
    `reason` is set and reading stops. Its `carrier` brings the blocks; others were `passed_over`, since they could not
    be used. `headers` describe the blocks that were read."""

    stays_open = False  # once all is read

    def __init__(self, offer: BlockOffer, first: int, count: int, groups: int, block_bytes: int) -> None:
        self.reason = self.carrier = ""
        self.passed_over: list[str] = []
        self.headers: list[BlockHeader] = []
        self._offer = offer
        self._wanted = first, count
        self._groups = groups
        self._block_bytes = block_bytes
        self._left = count
        self._source: OfferSource | None = None

    def read(self, block: WantedBlock, targets: Targets) -> bool:
        """Reads the next block into memory, by layer group; None: that group's is not wanted. Returns whether it is the
        block that was wanted, and as it was offered."""
        try:
            if self._source is None:
                self._source = self._open()
            self._read(self._source, block, targets)
        except TransferRefused as refused:
            self.reason = refused.reason
        except OSError:
            self.reason = LOST if self._source else UNREACHABLE
        except (IndexError, ValueError):  # no such place, or a file of another size
            self.reason = FOREIGN
        return not self.reason

    def close(self) -> None:
        if self._source is not None:
            with suppress(OSError):
                if not self._left:
                    self._source.connection.sendall(DONE)
                self._source.close()

    def _open(self) -> OfferSource:
        """Asks for the blocks where they are offered; raises TransferRefused with the engine's reason, or OSError if no
        address can be reached."""
        source = self._connect()
        self.carrier = source.scheme
        source.connection.sendall(REQUEST.pack(MAGIC, self._offer.id, self._offer.epoch, *self._wanted))
        if status := source.enter():
            source.close()
            raise TransferRefused(STATUS[status] if status < len(STATUS) else FOREIGN)
        return source

    def _connect(self) -> OfferSource:
        return connect(self._offer.addresses, self.passed_over)

    def _read(self, source: OfferSource, block: WantedBlock, targets: Targets) -> None:
        size = header_struct(len(block.tokens), self._groups).size
        header = BlockHeader.unpack(receive(source.connection, size), len(block.tokens), self._groups)
        if header[:3] != block:
            raise TransferRefused(OTHER_BLOCK)
        for part, target in zip(header.parts, targets, strict=True):
            if part.place >= 0:
                self._read_part(source, block.hash, part, target)
            elif target is not None:
                raise TransferRefused(OTHER_BLOCK)
        self.headers.append(header)
        self._left -= 1

    def _read_part(self, source: OfferSource, hash: bytes, part: BlockPart, target: memoryview | None) -> None:
        """Reads and verifies a layer group's block. A block longer than its target is cut; None: it is not wanted."""
        whole = target is not None and len(target) == self._block_bytes
        filled = target if whole and target is not None else memoryview(bytearray(self._block_bytes))
        if not source.read(part, filled):
            raise TransferRefused(STALE)
        if block_crc(hash, filled) != part.crc:
            raise TransferRefused(DAMAGED)
        if target is not None and not whole:
            target[:] = filled[: len(target)]


def connect(addresses: Sequence[str], passed_over: list[str]) -> OfferSource:
    """Connects to the first address that can be reached, and adds the carriers of those before it that are known but
    could not be used to `passed_over`; raises OSError if none can be."""
    from penstock.engine.kv_transfer import nixl, shm, tcp  # takes long, and is for those only who read

    sources: dict[str, Callable[[str], OfferSource]] = {
        shm.SCHEME: shm.ShmSource,
        tcp.SCHEME: tcp.TcpSource,
        nixl.SCHEME: nixl.NixlSource,
    }
    for address in addresses:
        scheme, _, rest = address.partition(":")
        if scheme in sources:
            try:
                return sources[scheme](rest)
            except (OSError, ValueError):
                passed_over.append(scheme)
    raise ConnectionError(f"no engine offers blocks at {', '.join(addresses)}")
