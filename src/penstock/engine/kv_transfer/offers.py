"""Offers blocks of the prefix cache to other engines: copies of them are staged for as long as a lease lasts.

Copies are offered, and not the blocks themselves: a reader that is slow, or never comes, keeps nothing from the KV
cache, and no reader can find a block that is being written to.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol

from penstock.backend.base import BlockMemory
from penstock.backend.blocks.host_room import CHUNK
from penstock.backend.blocks.rows import BlockRows
from penstock.backend.blocks.sharing import DeviceSharing
from penstock.config import available_memory
from penstock.core import hashing
from penstock.core.kvcache import KvCache
from penstock.core.prefix import PrefixNode
from penstock.engine.host_blocks import HostMemory
from penstock.engine.kv_disk.segment import block_crc, pack
from penstock.engine.kv_transfer.carrier import Listener, StagedPart
from penstock.engine.kv_transfer.cuda_ipc import SCHEME as CUDA_IPC
from penstock.engine.kv_transfer.cuda_ipc import open_staging_area
from penstock.engine.kv_transfer.leases import LeasedBlock, Leases
from penstock.engine.kv_transfer.nixl import SCHEME as NIXL
from penstock.engine.kv_transfer.nixl import NixlListener
from penstock.engine.kv_transfer.server import OfferServer
from penstock.engine.kv_transfer.shm import SCHEME as SHM
from penstock.engine.kv_transfer.shm import ShmListener
from penstock.engine.kv_transfer.staging import NOT_STAGED, StagedBlocks, StagedCopy
from penstock.engine.kv_transfer.state_parts import cut, names, part_count
from penstock.engine.kv_transfer.tcp import SCHEME as TCP
from penstock.engine.kv_transfer.tcp import TcpListener
from penstock.errors import ConfigError
from penstock.types import BlockOffer, Limits, Offered, PeerCounts
from penstock.types.messages import Offer

SHARE = 8  # offers take at most one part in SHARE of the free memory, and no more than the KV cache


class StagingArea(Protocol):
    """Stages copies of blocks in some memory, and lets others read them there."""

    @property
    def leases(self) -> Leases: ...

    @property
    def server(self) -> OfferServer: ...

    def copy(self, parts: Sequence[StagedPart]) -> Iterator[StagedCopy]: ...

    def close(self) -> None: ...


class HostStagingArea:
    """Stages blocks in host memory, and recurrent states: see StagingArea."""

    def __init__(self, memory: BlockMemory, host: HostMemory, leases: Leases, server: OfferServer) -> None:
        self.leases = leases
        self.server = server
        self._memory = memory
        self._rows = memory if isinstance(memory, BlockRows) else None
        self._host = host
        self._staging = leases.staging
        self._together = max(CHUNK // leases.staging.block_bytes, 1)
        self.state_parts = state_parts_of(host, leases.staging.block_bytes)

    def copy(self, parts: Sequence[StagedPart]) -> Iterator[StagedCopy]:
        for on_device, group in groupby(parts, key=lambda part: part.node.blocks[part.group] >= 0):
            run = list(group)
            if on_device:
                yield from self._export(run) if self._rows is None else self._copy_out(self._rows, run)
            else:
                assert self._host.blocks is not None
                for node, layer_group, place, _ in run:
                    data = self._host.blocks.read(node.places[layer_group])
                    yield StagedCopy(place, self._staging.write(place, data))

    def stage_state(self, where: tuple[int, int], last: LeasedBlock) -> list[LeasedBlock]:
        """Stages the recurrent state at the end of a block, which is in these places of the device and of host memory
        (see NoStates.where); returns its parts, none without a state."""
        state = b"" if self._host.states is None else self._host.states.copy_of(*where) or b""
        parts = list(cut(state, self._staging.block_bytes))
        others = [NOT_STAGED] * (len(last.copies) - 1)
        named = names(last.hash, len(parts), len(last.tokens))
        return [
            LeasedBlock(*name, (StagedCopy(place, self._staging.write(place, data)), *others), of_state=True)
            for name, place, data in zip(named, self._staging.take(len(parts)), parts, strict=True)
        ]

    def close(self) -> None:
        self.server.close()
        self._staging.close()

    def _copy_out(self, rows: BlockRows, parts: Sequence[StagedPart]) -> Iterator[StagedCopy]:
        places = [part.place for part in parts]
        self._staging.begin(places)
        blocks = [part.node.blocks[part.group] for part in parts]
        crcs = rows.copy_out(blocks, self._staging.rows, places, [block_crc(part.hash, b"") for part in parts])
        for place, crc in zip(places, crcs, strict=True):
            yield StagedCopy(place, self._staging.finish(place), crc)

    def _export(self, parts: Sequence[StagedPart]) -> Iterator[StagedCopy]:
        size = self._staging.block_bytes
        for at in range(0, len(parts), self._together):
            some = parts[at : at + self._together]
            data = memoryview(self._memory.export_blocks([part.node.blocks[part.group] for part in some]))
            for index, part in enumerate(some):
                generation = self._staging.write(part.place, data[index * size : (index + 1) * size])
                yield StagedCopy(part.place, generation)


class BlockOffers:
    """Finds cached blocks of a prompt and stages them: in host memory or, for readers on the same `device`, on that
    (`open_near`), if all of them are there. Recurrent states are staged only in host memory."""

    def __init__(
        self,
        cache: KvCache,
        limits: Limits,
        chain: hashing.Chain,
        identity: bytes,
        area: HostStagingArea,
        device: str = "",
        open_near: Callable[[], StagingArea | None] = lambda: None,
    ) -> None:
        self._identity = identity
        self._offers = self._offered = 0
        self._cache = cache
        self._size = limits.block_size
        self._chain = chain
        self._area = area
        self._device = device
        self._open_near: Callable[[], StagingArea | None] = open_near
        self._near: StagingArea | None = None

    def offer(self, message: Offer) -> Offered:
        """Stages what there is of a prompt, from the first block that is wanted on; what finds no room is left out."""
        prompt, first, trie = message.prompt, max(message.first, 0), self._cache.trie
        chain = trie.match(message.salt, prompt, (len(prompt) - 1) // self._size)
        area = self._area_for(message.device, chain)
        area.leases.expire()
        nodes = chain[first : self._that_fit(chain, first, area.leases.staging.free)]
        if not nodes:
            return Offered(message.id)
        hashes = self._chain(message.salt, prompt, self._size)
        before = hashes[first - 1] if first else hashing.root(message.salt)
        blocks = self._stage(area, nodes, hashes[first : first + len(nodes)], before)
        parts = self._area.stage_state(self._cache.states.where(nodes[-1]), blocks[-1])
        id = area.leases.grant([*blocks, *parts], message.seconds)
        self._offers += 1
        self._offered += len(blocks)
        present = [sum((place >= 0) << group for group, place in enumerate(block.places)) for block in blocks]
        present[-1] |= bool(parts) << self._cache.groups
        offer = BlockOffer(
            id,
            area.leases.epoch,
            self._identity,
            area.server.addresses,
            first,
            tuple(block.hash for block in blocks),
            tuple(present),
            message.seconds,
        )
        return Offered(message.id, offer)

    def end(self, id: bytes) -> None:
        """Ends an offer. Ended offers are ignored."""
        for area in self._areas:
            area.leases.end(id)

    def clear(self) -> None:
        for area in self._areas:
            area.leases.clear()

    def release_device(self) -> None:
        if self._near is not None:
            self._near.close()
            self._near = None

    def count(self, counts: PeerCounts) -> PeerCounts:
        leases = [area.leases for area in self._areas]
        return counts._replace(
            offers=self._offers,
            offered_blocks=self._offered,
            read_blocks=sum(each.read for each in leases),
            refusals=tuple(sorted(sum((each.refused for each in leases), Counter()).items())),
            leased_blocks=sum(each.staging.places - each.staging.free for each in leases),
        )

    def close(self) -> None:
        for area in self._areas:
            area.close()

    @property
    def _areas(self) -> list[StagingArea]:
        return [self._area] if self._near is None else [self._area, self._near]

    def _area_for(self, device: str, chain: Sequence[PrefixNode]) -> StagingArea:
        """Returns where blocks are staged for a reader on a device; empty: on any other."""
        if not device or device != self._device or not all(map(self._cache.trie.on_device, chain)):
            return self._area
        if self._near is None:
            self._near = self._open_near()
            if self._near is None:
                self._device = ""
        return self._near or self._area

    def _that_fit(self, chain: list[PrefixNode], first: int, free: int) -> int:
        """Returns how many of the chain's blocks can be reused elsewhere and staged from `first` on in `free`
        places."""
        count = len(chain)
        while (count := self._cache.prefixes.reusable(chain[:count])) > first:
            missing = self._wanted(chain[first:count], first, count) + self._area.state_parts - free
            if missing <= 0:
                break
            count = max(count + -missing // self._cache.groups, 0)  # below 0 the chain would be cut from its end
        return count

    def _starts(self, count: int) -> list[int]:
        return self._cache.trie.window_starts(count * self._size)

    def _wanted(self, nodes: Sequence[PrefixNode], first: int, count: int) -> int:
        return sum(first + at >= start for start in self._starts(count) for at in range(len(nodes)))

    def _stage(
        self, area: StagingArea, nodes: Sequence[PrefixNode], hashes: Sequence[bytes], before: bytes
    ) -> list[LeasedBlock]:
        first = nodes[0].depth
        starts = self._starts(first + len(nodes))
        needed = [[first + at >= start for start in starts] for at in range(len(nodes))]
        taken = iter(area.leases.staging.take(sum(map(sum, needed))))
        places = [tuple(next(taken) if need else -1 for need in groups) for groups in needed]
        parts = [
            StagedPart(node, group, place, hash)
            for node, given, hash in zip(nodes, places, hashes, strict=True)
            for group, place in enumerate(given)
            if place >= 0
        ]
        copies = {-1: NOT_STAGED} | {copy.place: copy for copy in area.copy(parts)}
        parents = (before, *hashes)
        return [
            LeasedBlock(hash, parent, pack(node.tokens), tuple(copies[place] for place in given))
            for node, hash, parent, given in zip(nodes, hashes, parents, places, strict=False)
        ]


def open_offers(
    listen: Sequence[str],
    identity: bytes,
    cache: KvCache,
    host: HostMemory,
    memory: BlockMemory,
    limits: Limits,
    chain: hashing.Chain,
    sharing: DeviceSharing | None = None,
) -> BlockOffers:
    """Offers blocks at these addresses; raises ConfigError if one cannot be listened on."""
    if CUDA_IPC in listen and sharing is None:
        raise ConfigError(f"KV blocks are offered at {CUDA_IPC} by engines on a GPU alone; leave it out")
    size = len(memory.export_blocks([0]))
    most = limits.num_blocks + limits.states * state_parts_of(host, size)
    places = min(most, available_memory() // SHARE // size)
    staging = StagedBlocks(max(places, 1), size)
    leases = Leases(staging, int.from_bytes(os.urandom(7), "little"))
    server = OfferServer(leases, [_listener(address, staging) for address in listen if address != CUDA_IPC])
    area = HostStagingArea(memory, host, leases, server)
    if CUDA_IPC not in listen or sharing is None or limits.states:
        return BlockOffers(cache, limits, chain, identity, area)
    open_near = partial(open_staging_area, sharing, limits.num_blocks, leases.epoch)
    return BlockOffers(cache, limits, chain, identity, area, sharing.name, open_near)


def state_parts_of(host: HostMemory, block_bytes: int) -> int:
    """Returns of how many parts the states of a model consist; 0: it has none."""
    return 0 if host.states is None else part_count(host.states.block_bytes, block_bytes)


def _listener(address: str, staging: StagedBlocks) -> Listener:
    """Returns the listener for an address: "shm", or "tcp:HOST:PORT" or "nixl:HOST:PORT" with port 0 for any.
    "cuda_ipc" has memory of its own."""
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    try:
        if scheme == SHM:
            return ShmListener()
        if scheme == TCP:
            return TcpListener(host, int(port))
        if scheme == NIXL:
            return NixlListener(host, int(port), staging)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the engine cannot offer KV blocks at {address}: {error}; give another address") from error
    raise ConfigError(f"KV blocks are offered at cuda_ipc, shm, tcp:HOST:PORT or nixl:HOST:PORT; got {address!r}")
