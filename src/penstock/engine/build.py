"""From a config to an engine that is ready to step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.backend import open_backend, settle
from penstock.backend.base import Backend
from penstock.backend.quantize_at_load import quantized
from penstock.config import Config, resolve
from penstock.engine.engine import Engine
from penstock.engine.grammar import Grammars
from penstock.errors import OutOfMemory
from penstock.model.load import Checkpoint, load_model, open_checkpoint, text_of
from penstock.planning.memory_plan import all_states, gigabytes, plan_memory
from penstock.types import Limits

Tell = Callable[[str], None]
TRIES = 4  # to reserve a cache: others may take memory meanwhile


class Ledger:
    """Where the time went: seconds by what they were spent on."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._spent: list[str] = []

    def enter(self, what: str) -> None:
        now = time.perf_counter()
        self._spent.append(f"{what} {now - self._last:.2f} s")
        self._last = now

    def __str__(self) -> str:
        return ", ".join(self._spent)


def silent(_: str) -> None: ...


def open_engine(config: Config, tell: Tell = silent) -> Engine:
    return build_engine(config, open_checkpoint(Path(config.model)), tell)


def build_engine(config: Config, checkpoint: Checkpoint, tell: Tell = silent) -> Engine:
    """`tell` hears, on a GPU, what memory is for before any is taken, and where the time went."""
    config, ledger = settle(config, checkpoint.float8, checkpoint.whole), Ledger()
    if config.device != "cuda":
        tell = silent
    backend, checkpoint = open_backend(config), quantized(checkpoint, config)
    ledger.enter(config.device)
    if config.device == "cuda":
        has = backend.footprint(checkpoint.spec, checkpoint.tensors.values())
        for line in plan_memory(config, checkpoint.spec, has).lines():
            tell(line)
    backend.load(load_model(checkpoint, backend))
    ledger.enter("weights")
    limits = _reserve(config, checkpoint, backend)
    ledger.enter("cache")
    backend.warm_up()
    ledger.enter("kernels")
    cache = limits.num_blocks * limits.block_size
    tell(f"engine ready: {ledger}; {cache:,} tokens in {gigabytes(cache * backend.kv_bytes_per_token())} of KV cache")
    grammars = Grammars(lambda: text_of(open_checkpoint(Path(config.model))).tokenizer, limits.vocab)
    return Engine(backend, limits, depth=backend.depth, grammars=grammars)


def _reserve(config: Config, checkpoint: Checkpoint, backend: Backend) -> Limits:
    """Limits, and the cache they speak of; a little less where there turns out to be less memory than a moment ago."""
    spec = checkpoint.spec
    for left in reversed(range(TRIES)):
        room = backend.kv_memory()
        if config.device == "cuda":
            config = replace(config, kv_memory=min(config.kv_memory or room, room))
        limits = resolve(
            config,
            context=spec.max_len,
            vocab=spec.vocab,
            kv_bytes=backend.kv_bytes_per_token(),
            memory=room,
            encoder=spec.encoder,
            state_bytes=backend.state_bytes(),
        )._replace(dim=spec.dim, pooling=spec.pooling)
        try:
            backend.reserve_kv(limits.num_blocks, limits.block_size, all_states(limits))
        except OutOfMemory:
            if not left:
                raise
            config = replace(config, kv_memory=config.kv_memory * 7 // 8)
        else:
            break
    return limits
