"""Opens the store of an engine's prompts."""

from __future__ import annotations

import os
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
    cannot be for such a model (missing_tiers says so). If there is some already, `tell` is told."""
    if not config.kv_disk or limits.encoder:
        return None
    if not hasattr(os, "preadv"):
        raise ConfigError("kv_disk needs reads that this system does not have: leave it out, or use WSL on Windows")
    block_bytes = len(backend.kv.export_blocks([0]))
    state_bytes = len(backend.states.export_blocks([0])) if limits.states else 0
    if not limits.host_places or (state_bytes and not limits.host_states):
        least = f" of at least {block_bytes + state_bytes:,}" if state_bytes else ""
        raise ConfigError(f"kv_disk needs host memory to read blocks into: set kv_ram to a number of bytes{least}")
    layout = BlockLayout(blocks, limits.block_size, len(limits.windows), block_bytes, state_bytes)
    store = SegmentStore(Path(config.kv_disk).expanduser(), layout, config.kv_disk_bytes)
    store.open()
    if len(store):
        tell(f"KV on disk: {len(store) * limits.block_size:,} tokens of earlier prompts in {config.kv_disk}")
    return store
