"""Opens the memory in which the KV cache of an engine process outlives it, and knows whose KV can be used again."""

from __future__ import annotations

import json
from hashlib import blake2b

from penstock import __version__
from penstock.backend.base import Backend
from penstock.backend.kv_file import FINGERPRINT, KvFile
from penstock.backend.packed_cache import identity
from penstock.config import Config, Device
from penstock.engine.kv_ledger import KvLedger, ledger_bytes
from penstock.model.load import Checkpoint
from penstock.types import Limits


def open_kv_file(config: Config, checkpoint: Checkpoint) -> KvFile | None:
    """Returns the file that the KV cache lies in; None if it is private memory. That of a model with recurrent layers
    is: a prefix of theirs is of no use without the states behind it."""
    spec, on_cpu = checkpoint.spec, Device.parse(config.device).kind == "cpu"
    if not config.kv_file or not on_cpu or spec.encoder or spec.state_bytes:
        return None
    return KvFile(config.kv_file)


def open_ledger(file: KvFile, fingerprint: bytes, limits: Limits, kv_memory: int) -> KvLedger:
    """Returns the ledger of a KV cache that takes `kv_memory` bytes of a file. What the file has of another KV cache is
    dropped."""
    memory = file.take(ledger_bytes(limits))
    file.claim(fingerprint, kv_memory)
    file.close()
    return KvLedger(memory, limits)


def fingerprint_of(config: Config, checkpoint: Checkpoint, backend: Backend, limits: Limits) -> bytes:
    """Returns what is the same for two engines if one can use the other's KV: weights, layout and arithmetic. Adapters
    and weights that were updated are part of the chain hashes."""
    files = [identity(file) for file in checkpoint.files]
    weights = __version__, config.quantize, config.config, files
    layout = backend.name, backend.kv.fingerprint(), limits.num_blocks, limits.max_len, limits.windows
    return blake2b(json.dumps([weights, layout]).encode(), digest_size=FINGERPRINT).digest()
