"""Experts stored in MXFP4 as gpt-oss publishes them (scripts/make_latent_goldens.py): values and whole models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.backend.ref.random_steps import blocks_for, random_steps
from penstock.model.load import load_model, open_checkpoint

FOLDER = Path(__file__).parent / "mxfp4"
BLOCK_SIZE = 4


def test_experts_stay_as_they_are() -> None:
    tensors = open_checkpoint(FOLDER).tensors
    for part in ("gate", "up", "down"):
        tensor = tensors[f"layers.1.experts.3.{part}"]
        assert (tensor.format.name, tensor.shape) == ("MXFP4", (32, 32))


@pytest.mark.parametrize(("make", "tolerance"), [(RefBackend, 5e-5), (lambda: CpuBackend(2, kv="f32"), 0.06)])
def test_logits_are_those_of_transformers(make: Callable[[], Any], tolerance: float) -> None:
    """On a CPU, activations are rounded to 8 bits."""
    with np.load(FOLDER / "expected.npz") as file:
        tokens, wanted = file["tokens"].tolist(), file["logits"]
    backend = make()
    backend.load(load_model(open_checkpoint(FOLDER), backend))
    prompts = [tokens, tokens[:5]]
    backend.reserve_kv(blocks_for(prompts, BLOCK_SIZE), BLOCK_SIZE)
    for chunks in random_steps(np.random.default_rng(0), prompts, BLOCK_SIZE):
        parts = np.concatenate([wanted[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks])
        assert np.linalg.norm(backend.logits(greedy_batch(chunks)) - parts) < tolerance * np.linalg.norm(parts)
