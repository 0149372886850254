"""Models that GGUF files cannot express, against logits that transformers computed (scripts/make_dense_goldens.py,
scripts/make_older_goldens.py, scripts/make_llama4_goldens.py, scripts/make_kimi_goldens.py)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.backend.ref.random_steps import blocks_for, random_steps
from penstock.model.load import load_model, open_checkpoint

FOLDERS = Path(__file__).parent / "folders"
BLOCK_SIZE = 16
WINDOWED = ("cwm", "llama4_chunks", "vaultgemma")
NAMES = (*WINDOWED, "falcon_grouped", "gpt_neox_serial", "opt", "opt_350m", "kimi_linear")


@pytest.mark.parametrize("make", [partial(CpuBackend, 2, kv="f32"), RefBackend], ids=["cpu", "ref"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name, make):
    with np.load(FOLDERS / name / "expected.npz") as file:
        tokens, wanted = file["tokens"].tolist(), file["logits"]
    checkpoint = open_checkpoint(FOLDERS / name, strict=True)
    assert (len(checkpoint.spec.windows) > 1) == (name in WINDOWED)
    backend = make()
    backend.load(load_model(checkpoint, backend))
    prompts = [tokens, tokens[:5], tokens[:30]]
    backend.reserve_kv(blocks_for(prompts, BLOCK_SIZE), BLOCK_SIZE, len(prompts))
    whole = backend.logits(greedy_batch([Chunk(tokens, 0, range(blocks_for([tokens], BLOCK_SIZE)))]))
    assert np.abs(whole - wanted).max() < 1e-4
    for chunks in random_steps(np.random.default_rng(0), prompts, BLOCK_SIZE):
        parts = [wanted[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks]
        assert np.abs(backend.logits(greedy_batch(chunks)) - np.concatenate(parts)).max() < 1e-4
