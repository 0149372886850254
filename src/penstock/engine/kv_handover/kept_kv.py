"""Keeps the KV cache of an engine process for the next process: its blocks lie in a file, and a ledger lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.backend.blocks.kv_file import KvFile
from penstock.backend.devices import device_kind
from penstock.config import Config
from penstock.core.kvcache import KvCache
from penstock.engine.feature import Feature
from penstock.engine.kv_handover.identity import cache_identity
from penstock.engine.kv_handover.ledger import KvLedger, ledger_bytes
from penstock.model.load import Checkpoint
from penstock.types import Limits


class KeptKv(Feature):
    """Adopts the blocks that the engine process before has left, and keeps the ledger up to date."""

    def __init__(self, ledger: KvLedger, cache: KvCache) -> None:
        self._ledger = ledger
        self._adopted = ledger.adopt_into(cache)

    def after_step(self) -> None:
        self._ledger.settle(self.engine.scheduler.running)

    def weights_changed(self) -> None:
        self._ledger.freeze()

    def stats(self) -> Mapping[str, Any]:
        return {"adopted_blocks": self._adopted}

    def hello(self) -> Mapping[str, Any]:
        return {"can_stand_by": True}


def open_kv_file(config: Config, checkpoint: Checkpoint) -> KvFile | None:
    """Returns the file that the KV cache and recurrent states lie in; None if they are private memory."""
    if not config.kv_file or not device_kind(config.device).kv_in_file or checkpoint.spec.encoder:
        return None
    return KvFile(config.kv_file)


def open_ledger(file: KvFile, blocks: bytes, limits: Limits, kv_memory: int) -> KvLedger:
    """Returns the ledger of a KV cache that may take `kv_memory` bytes of a file, with states, and whose blocks have
    this identity. What the file has of another KV cache is dropped."""
    memory = file.take(ledger_bytes(limits))
    file.claim(cache_identity(blocks, limits), kv_memory)
    file.close()
    return KvLedger(memory, limits)
