"""Keeps the KV cache of an engine process for the next process: its blocks lie in a file, and a ledger lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.backend.base import DeviceKeeper
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

    def __init__(self, ledger: KvLedger, cache: KvCache, keeper: DeviceKeeper | None) -> None:
        self._ledger = ledger
        self._adopted = ledger.adopt_into(cache)
        self._keeper = keeper

    def after_step(self) -> None:
        """Notes written blocks. While a step is in flight, these are the blocks of the steps before."""
        late = len(self.engine.pipeline.in_flight)
        if not late and self._ledger.pending and self._keeper is not None:
            self._keeper.synchronize()  # copies may be queued
        self._ledger.settle(self.engine.scheduler.running, late)

    def weights_changed(self) -> None:
        self._ledger.freeze()

    def stats(self) -> Mapping[str, Any]:
        return {"adopted_blocks": self._adopted}

    def hello(self) -> Mapping[str, Any]:
        return {"can_stand_by": True}


def open_kv_file(config: Config, checkpoint: Checkpoint) -> KvFile | None:
    """Returns the file of the ledger, and on a CPU also of the KV cache and recurrent states; None if they end with
    this process."""
    kind = device_kind(config.device)
    outlives = kind.kv_in_file or (kind.exports_memory and config.descriptors)
    if not config.kv_file or not outlives or checkpoint.spec.encoder:
        return None
    return KvFile(config.kv_file)


def open_ledger(
    file: KvFile, blocks: bytes, limits: Limits, kv_memory: int, keeper: DeviceKeeper | None
) -> KvLedger | None:
    """Returns the ledger of a KV cache that may take `kv_memory` bytes, with states, and whose blocks have this
    identity. It forgets the blocks of another KV cache. There is none if the device's memory ends with this process."""
    if keeper is not None and not keeper.kv_id:
        return None
    memory = file.take(ledger_bytes(limits))
    file.claim(cache_identity(blocks, limits, keeper.kv_id if keeper else b""), kv_memory)
    file.close()
    return KvLedger(memory, limits)
