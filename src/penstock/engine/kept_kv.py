"""Opens the memory in which the KV cache of an engine process outlives it."""

from __future__ import annotations

from penstock.backend.kv_file import KvFile
from penstock.config import Config, Device
from penstock.engine.kv_identity import cache_identity
from penstock.engine.kv_ledger import KvLedger, ledger_bytes
from penstock.model.load import Checkpoint
from penstock.types import Limits


def open_kv_file(config: Config, checkpoint: Checkpoint) -> KvFile | None:
    """Returns the file that the KV cache and recurrent states lie in; None if they are private memory."""
    on_cpu = Device.parse(config.device).kind == "cpu"
    if not config.kv_file or not on_cpu or checkpoint.spec.encoder:
        return None
    return KvFile(config.kv_file)


def open_ledger(file: KvFile, blocks: bytes, limits: Limits, kv_memory: int) -> KvLedger:
    """Returns the ledger of a KV cache that may take `kv_memory` bytes of a file, with states, and whose blocks have
    this identity. What the file has of another KV cache is dropped."""
    memory = file.take(ledger_bytes(limits))
    file.claim(cache_identity(blocks, limits), kv_memory)
    file.close()
    return KvLedger(memory, limits)
