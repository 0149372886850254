"""Opens the store of an engine's prompts: says what the contents of its blocks depend on, and where they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

from penstock import __version__
from penstock.backend.base import Backend
from penstock.backend.packed_cache import identity
from penstock.config import Config
from penstock.engine.kv_disk.segment import BlockLayout
from penstock.engine.kv_disk.store import SegmentStore
from penstock.errors import ConfigError
from penstock.model.load import Checkpoint
from penstock.types import Limits

KERNELS = 1  # of all backends: a change of what any of them computes needs another number
SIZE = 16  # bytes


def open_store(
    config: Config, checkpoints: Sequence[Checkpoint], backend: Backend, limits: Limits, tell: Callable[[str], None]
) -> SegmentStore | None:
    """Returns where the KV of prompts is kept for a model, which comes first, and what drafts for it; None if it is not
    to be, or cannot be for such a model: `tell` is told."""
    if not config.kv_disk:
        return None
    if limits.states or limits.encoder:
        kind = "recurrent layers, whose states are not kept" if limits.states else "no KV to keep"
        tell(f"KV on disk: --kv-disk has no effect on this model, because it has {kind}")
        return None
    if not limits.host_places:
        raise ConfigError("kv_disk needs host memory to read blocks into: set kv_ram to a number of bytes")
    block_bytes = len(backend.kv.export_blocks([0]))
    layout = BlockLayout(fingerprint(config, checkpoints, backend), limits.block_size, len(limits.windows), block_bytes)
    store = SegmentStore(Path(config.kv_disk).expanduser(), layout, config.kv_disk_bytes)
    store.open()
    if len(store):
        tell(f"KV on disk: {len(store) * limits.block_size:,} tokens of earlier prompts in {config.kv_disk}")
    return store


def fingerprint(config: Config, checkpoints: Sequence[Checkpoint], backend: Backend) -> bytes:
    """Returns a digest of all that the contents of blocks depend on: the weights, how they are changed at load, RoPE,
    and what computes and stores. Adapters are part of a prompt's salt."""
    files = [[identity(file) for file in each.files] for each in checkpoints]
    contexts = [each.spec.max_len if each.spec.long else 0 for each in checkpoints]
    computes = [KERNELS, __version__, backend.device, backend.name, backend.kv.fingerprint()]
    parts = json.dumps([computes, config.quantize, config.config, contexts, files])
    return blake2b(parts.encode(), digest_size=SIZE).digest()
