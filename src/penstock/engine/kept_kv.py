"""Opens the memory in which the KV cache of an engine process outlives it."""

from __future__ import annotations

from penstock.backend.kv_file import KvFile
from penstock.config import Config, Device
from penstock.engine.kv_identity import cache_identity
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


def open_ledger(file: KvFile, blocks: bytes, limits: Limits, kv_memory: int) -> KvLedger:
    """Returns the ledger of a KV cache that takes `kv_memory` bytes of a file and whose blocks have this identity. What
    the file has of another KV cache is dropped."""
    memory = file.take(ledger_bytes(limits))
    file.claim(cache_identity(blocks, limits), kv_memory)
    file.close()
    return KvLedger(memory, limits)
