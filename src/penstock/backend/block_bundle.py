"""Bundles KV blocks with the fingerprint of their layout, to hand them from one backend to another."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.backend.base import BlockMemory
from penstock.errors import KvLayoutMismatch


class Bundle(msgspec.Struct, array_like=True):
    """Holds the contents of some blocks."""

    fingerprint: str
    count: int
    data: bytes


def bundle_blocks(memory: BlockMemory, blocks: Sequence[int]) -> bytes:
    """Returns the contents of the blocks and what is needed to check them before they are written elsewhere."""
    return msgspec.msgpack.encode(Bundle(memory.fingerprint(), len(blocks), memory.export_blocks(blocks)))


def unbundle_blocks(memory: BlockMemory, blocks: Sequence[int], bundle: bytes) -> None:
    """Writes what `bundle_blocks` returned to as many blocks. Raises KvLayoutMismatch, and writes nothing, if the
    blocks come from a cache with another layout or are another number."""
    try:
        found = msgspec.msgpack.decode(bundle, type=Bundle)
    except msgspec.MsgspecError as error:
        raise KvLayoutMismatch(f"these {len(bundle)} bytes are no bundle of KV blocks: {error}") from error
    if found.fingerprint != memory.fingerprint():
        raise KvLayoutMismatch(
            f"the KV blocks have another layout: got ({found.fingerprint}), this cache has ({memory.fingerprint()}); "
            "use the same model, --kv type and block size on both sides"
        )
    if found.count != len(blocks):
        raise KvLayoutMismatch(f"the bundle has {found.count} KV blocks, and there is room for {len(blocks)}")
    memory.import_blocks(blocks, found.data)
