"""From a config to an engine that is ready to step."""

from __future__ import annotations

from pathlib import Path

from penstock.backend import open_backend, settle
from penstock.config import Config, resolve
from penstock.engine.engine import Engine
from penstock.model.load import Checkpoint, load_model, open_checkpoint


def open_engine(config: Config) -> Engine:
    return build_engine(config, open_checkpoint(Path(config.model)))


def build_engine(config: Config, checkpoint: Checkpoint) -> Engine:
    config = settle(config)
    backend = open_backend(config)
    backend.load(load_model(checkpoint, backend))
    limits = resolve(
        config,
        context=checkpoint.spec.max_len,
        vocab=checkpoint.spec.vocab,
        kv_bytes=backend.kv_bytes_per_token(),
        memory=backend.kv_memory(),
    )
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    backend.warm_up()
    return Engine(backend, limits, depth=backend.depth)
