"""Carries blocks between engines on one GPU: they are copied from device memory to device memory.

It works like shm.py with another kind of block: host memory has the checksum and generation of each block, and the
block itself is in the same place of a room on the device, which the reader opens. The reader copies the block straight
to its KV cache, computes the checksum of the copy, and compares the generation again.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from struct import Struct

from penstock.backend.blocks.sharing import DeviceSharing, OpenedRoom, SharedRoom
from penstock.engine.kv_disk.loading import Targets
from penstock.engine.kv_disk.segment import block_crc
from penstock.engine.kv_transfer.carrier import OfferSource, StagedPart, welcome_of
from penstock.engine.kv_transfer.direct_reader import DirectReader, FilledPart
from penstock.engine.kv_transfer.leases import Leases
from penstock.engine.kv_transfer.server import OfferServer
from penstock.engine.kv_transfer.shm import ShmListener, ShmSource
from penstock.engine.kv_transfer.staging import StagedBlocks, StagedCopy
from penstock.engine.kv_transfer.wire import receive
from penstock.types import BlockOffer

log = logging.getLogger(__name__)
SCHEME = "cuda_ipc"
CHECKSUM = Struct("<Q")
HANDLE = Struct("<I")  # bytes of the handle that follows
LARGEST = 1 << 12  # bytes of a handle


class CudaIpcListener(ShmListener):
    """Listens on a Unix socket for readers on the same device: see Listener."""

    def __init__(self, device: str, room: SharedRoom) -> None:
        super().__init__()
        self.address = f"{SCHEME}:{device}/{self.address.partition(':')[2]}"
        self._handle = HANDLE.pack(len(room.handle)) + room.handle

    def welcome(self, connection: socket.socket, staging: StagedBlocks) -> None:
        socket.send_fds(connection, [welcome_of(staging) + self._handle], [staging.file])


class DeviceStagingArea:
    """Stages blocks on the device: see StagingArea."""

    def __init__(self, sharing: DeviceSharing, places: int, epoch: int) -> None:
        self._room = sharing.share(places)
        self._staging = StagedBlocks(self._room.places, CHECKSUM.size)
        self.leases = Leases(self._staging, epoch)
        self.server = OfferServer(self.leases, [CudaIpcListener(sharing.name, self._room)])

    def copy(self, parts: Sequence[StagedPart]) -> Iterator[StagedCopy]:
        places = [part.place for part in parts]
        self._staging.begin(places)
        sums = self._room.write([part.node.blocks[part.group] for part in parts], places)
        for place, sum in zip(places, sums, strict=True):
            yield StagedCopy(place, self._staging.write(place, CHECKSUM.pack(sum)))

    def close(self) -> None:
        self.server.close()
        self._staging.begin(range(self._room.places))
        self._staging.close()
        self._room.close()


def open_staging_area(sharing: DeviceSharing, places: int, epoch: int) -> DeviceStagingArea | None:
    """Returns a staging area on the device; None, which is logged: too little memory."""
    try:
        return DeviceStagingArea(sharing, places, epoch)
    except OSError as error:
        log.warning("KV blocks are offered through host memory to engines on this device, too: %s", error)
        return None


class CudaIpcSource(ShmSource):
    """Reads checksums where they are staged, and opens the room with the blocks: see OfferSource. Raises OSError if the
    engine does not exist or is on another device."""

    scheme = SCHEME

    def __init__(self, sharing: DeviceSharing, rest: str) -> None:
        device, _, name = rest.rpartition("/")
        if device != sharing.name:
            raise OSError(f"blocks are offered on device {device}; this one is {sharing.name}")
        super().__init__(name)
        self._sharing = sharing
        self.room: OpenedRoom | None = None

    def enter(self) -> int:
        status = super().enter()
        if not status:
            (size,) = HANDLE.unpack(receive(self.connection, HANDLE.size))
            if size > LARGEST:
                raise ValueError(f"a handle has at most {LARGEST} bytes; got {size}")
            handle = receive(self.connection, size)
            try:
                self.room = self._sharing.open(handle)
            except RuntimeError as error:  # torch raises it
                raise OSError(str(error)) from error
        return status

    def close(self) -> None:
        room, self.room = self.room, None
        if room is not None:
            room.close()
        super().close()


class DeviceReader(DirectReader):
    """Reads the checksums of blocks, and copies those from the room on the device: see DirectReader."""

    def __init__(self, offer: BlockOffer, first: int, count: int, groups: int, sharing: DeviceSharing) -> None:
        super().__init__(offer, first, count, groups, CHECKSUM.size)
        self._sharing = sharing

    def targets(self, wanted: Sequence[Sequence[bool]]) -> list[Targets]:
        return [[memoryview(bytearray(CHECKSUM.size)) if want else None for want in groups] for groups in wanted]

    def _copy(self, parts: Sequence[FilledPart]) -> list[int]:
        source = self._source
        if not isinstance(source, CudaIpcSource) or source.room is None:
            raise OSError("the memory that they are in was never opened")
        sums = source.room.read([each.part.place for each in parts], [each.block for each in parts])
        return [block_crc(each.hash, CHECKSUM.pack(sum)) for each, sum in zip(parts, sums, strict=True)]

    def _generation(self, place: int) -> int:
        assert isinstance(self._source, CudaIpcSource)
        return self._source.generation(place)

    def _connect(self) -> OfferSource:
        [address] = [each for each in self._offer.addresses if is_near(each, self._sharing)]
        return CudaIpcSource(self._sharing, address.partition(":")[2])


def is_near(address: str, sharing: DeviceSharing) -> bool:
    return address.startswith(f"{SCHEME}:{sharing.name}/")


def device_reader(
    offer: BlockOffer, first: int, count: int, groups: int, sharing: DeviceSharing | None
) -> DeviceReader | None:
    """Returns the reader of an offer made on the same device; None: it was made elsewhere."""
    if sharing is None or not any(is_near(address, sharing) for address in offer.addresses):
        return None
    return DeviceReader(offer, first, count, groups, sharing)
