"""Opens the store of an engine's prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.backend.base import Backend
from penstock.config import Config
from penstock.engine.kv_disk.segment import BlockLayout
from penstock.engine.kv_disk.store import SegmentStore
from penstock.errors import ConfigError
from penstock.types import Limits


def open_store(
    config: Config, blocks: bytes, backend: Backend, limits: Limits, tell: Callable[[str], None]
) -> SegmentStore | None:
    """Returns where the KV of prompts is kept for a model whose blocks have this identity; None if it is not to be, or
    cannot be for such a model: `tell` is told."""
    if not config.kv_disk:
        return None
    if limits.states or limits.encoder:
        kind = "recurrent layers, whose states are not kept" if limits.states else "no KV to keep"
        tell(f"KV on disk: --kv-disk has no effect on this model, because it has {kind}")
        return None
    if not limits.host_places:
        raise ConfigError("kv_disk needs host memory to read blocks into: set kv_ram to a number of bytes")
    block_bytes = len(backend.kv.export_blocks([0]))
    layout = BlockLayout(blocks, limits.block_size, len(limits.windows), block_bytes)
    store = SegmentStore(Path(config.kv_disk).expanduser(), layout, config.kv_disk_bytes)
    store.open()
    if len(store):
        tell(f"KV on disk: {len(store) * limits.block_size:,} tokens of earlier prompts in {config.kv_disk}")
    return store
