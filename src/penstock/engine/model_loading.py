"""Opens the configured model and loads its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.backend.base import Backend
from penstock.backend.weight_exchange import KeepingPacker, PackedWeight
from penstock.config import Config
from penstock.engine.kv_handover.identity import weights_identity
from penstock.engine.low_priority import run_yielding
from penstock.model.load import Checkpoint, load_placed, open_checkpoint, unknown_line
from penstock.model.low_rank import Placement
from penstock.model.packer import Packs
from penstock.model.registry import PackedModel
from penstock.model.spec import ModelSpec


def open_configured(config: Config) -> Checkpoint:
    """Opens the model of a config. Fields of its config.json that nothing is known of are logged, and which of its two
    RoPEs a model with LongRoPE gets."""
    checkpoint = open_checkpoint(Path(config.model), config.config, config.strict_config, config.max_len)
    lines = [unknown_line(checkpoint.unknown)] if checkpoint.unknown else []
    if checkpoint.spec.long:
        lines.append(long_context_line(checkpoint.spec))
    if lines:
        import logging  # takes longer than reading the rest

        for line in lines:
            logging.getLogger(__name__).warning(line)
    return checkpoint


def long_context_line(spec: ModelSpec) -> str:
    if spec.max_len == spec.longest:
        return "longrope: all positions have the long factors, because max_len is beyond the model's original context"
    return (
        f"longrope: the context is the original one, {spec.max_len} tokens, with the short factors; "
        f"a larger --max-len, up to {spec.longest}, gives all positions the long ones"
    )


class LoadedWeights(NamedTuple):
    """Holds a loaded model, the places of its tensors and the weights as they were packed."""

    model: PackedModel
    placements: Sequence[Placement]
    kept: Sequence[PackedWeight]


def open_packer(config: Config, checkpoints: Sequence[Checkpoint], backend: Backend) -> Packs:
    """Returns the packer of a model and its draft model. It reuses weights that the previous engine left."""
    if backend.keeper is None:
        return backend
    return backend.keeper.packer(weights_identity(config, checkpoints, backend), backend)


def load_weights(checkpoint: Checkpoint, backend: Backend, packs: Packs, *, yielding: bool) -> LoadedWeights:
    packer = KeepingPacker(packs)

    def load() -> LoadedWeights:
        model, placements = load_placed(checkpoint, packer)
        backend.load(model)
        return LoadedWeights(model, placements, packer.kept)

    return run_yielding(load) if yielding else load()
