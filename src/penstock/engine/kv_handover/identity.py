"""Says whose KV blocks can be used again: by the next engine process, and after a restart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b

from penstock import __version__
from penstock.backend.base import Backend
from penstock.backend.packed_cache import LAYOUT, identity
from penstock.config import Config
from penstock.model.load import Checkpoint
from penstock.types import Limits

KERNELS = 1  # raise it if any backend's kernels compute something else
SIZE = 16  # bytes


def kv_identity(config: Config, checkpoints: Sequence[Checkpoint], backend: Backend) -> bytes:
    """Returns a digest of all that the contents of blocks depend on: the weights of a model and of what drafts for it,
    how they are changed at load, RoPE, and what computes and stores, recurrent states included. Adapters and the
    version of updated weights are part of a prompt's salt."""
    files = [[identity(file) for file in each.files] for each in checkpoints]
    contexts = [each.spec.max_len if each.spec.long else 0 for each in checkpoints]
    kind = backend.device.partition(":")[0]  # GPUs of one name compute the same
    computes = [KERNELS, __version__, kind, backend.name, backend.kv.fingerprint()]
    if any(each.spec.state_bytes for each in checkpoints):
        computes.append(backend.states.fingerprint())
    return _digest([computes, config.quantize, config.config, contexts, files])


def cache_identity(blocks: bytes, limits: Limits, memory: bytes = b"") -> bytes:
    """Returns a digest of a KV cache as a whole, whose blocks have this identity: also of how many there are, and of
    the memory that they lie in, if that is not the ledger's own file."""
    states = [limits.max_rows, limits.states] if limits.states else []
    return _digest([blocks.hex(), limits.num_blocks, limits.max_len, limits.windows, *states, memory.hex()])


def weights_identity(config: Config, checkpoints: Sequence[Checkpoint], backend: Backend) -> str:
    """Returns a digest of everything that determines packed weights: files, changes at load, drafts and the packer."""
    files = [[identity(file) for file in each.files] for each in checkpoints]
    packs = [LAYOUT, __version__, backend.device, backend.name, config.deterministic]
    return _digest([packs, config.quantize, config.config, config.max_len, config.draft, files]).hex()


def _digest(parts: Sequence[object]) -> bytes:
    return blake2b(json.dumps(parts).encode(), digest_size=SIZE).digest()
