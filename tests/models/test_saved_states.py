"""Recurrent models go on from a saved state as if from the tokens before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.base import StateMove
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.model.load import load_model, open_checkpoint

GOLDENS = Path(__file__).parent / "goldens"
NAMES = (
    "jamba",
    "lfm2",
    "lfm2moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "kimi_linear",
    "bamba",
    "falcon_h1",
    "nemotron_h",
)


BACKENDS: dict[str, Callable[[], Any]] = {"ref": RefBackend, "cpu": lambda: CpuBackend(2, kv="f32")}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_is_as_good_as_the_tokens_before_it(name: str, backend: str):
    """It is saved in the middle of a chunk, and one in another slot goes on from there; the blocks are the same."""
    with np.load(GOLDENS / name / "expected.npz") as file:
        tokens, logits = file["tokens"].tolist(), file["logits"]
    computes = BACKENDS[backend]()
    computes.load(load_model(open_checkpoint(GOLDENS / name), computes))
    computes.reserve_kv(12, 4, 5)
    first = greedy_batch([Chunk(tokens[:21], 0, range(12), 0)])
    computes.logits(replace(first, moves=(StateMove(0, -1, 4, 16),)))
    second = greedy_batch([Chunk(tokens[16:], 16, range(12), 1), Chunk(tokens[:9], 0, range(3), 0)], 1)
    got = computes.logits(replace(second, moves=(StateMove(0, 4, -1, 0),)))
    assert np.abs(got - np.concatenate([logits[16:], logits[:9]])).max() < 1e-4
