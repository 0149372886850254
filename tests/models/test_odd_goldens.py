"""Configurations that nobody has published, against what transformers computed of them (scripts/make_odd_goldens.py
says how to add one): 330 tokens in random chunks, then 20 greedy steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu.quantize import quantize
from penstock.backend.ref import RefBackend
from penstock.backend.ref.random_steps import with_groups
from penstock.model.gguf.export import export
from penstock.model.gguf.writer import write_gguf
from penstock.model.load import Checkpoint, load_model, open_checkpoint
from tests.models.odd_weights import random_weight, random_weights

ODD = Path(__file__).parent / "odd"
NAMES = sorted(folder.name for folder in ODD.iterdir())
BLOCK_SIZE = 16
BEHIND = 10**6  # a block that does not exist, in place of those behind a window
LONGEST = 90  # tokens of a chunk
TOLERANCE = 5e-4
FEW = 48  # tokens for the reference, which is slow


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(ODD / name / "expected.npz") as file:
        return dict(file)


def opened(name: str, folder: Path, weights: np.ndarray) -> Checkpoint:
    """Writes the checkpoint of a golden into a folder and opens it."""
    shutil.copy(ODD / name / "config.json", folder)
    config = json.loads((ODD / name / "config.json").read_text())
    save_file(random_weights(config, json.loads(weights.item())), folder / "model.safetensors")
    return open_checkpoint(folder, strict=True, max_len=512)


class Sequence:
    """Computes one sequence, chunk by chunk, in blocks scattered over a cache that has just room for it."""

    def __init__(self, backend: Any, checkpoint: Checkpoint, tokens: int) -> None:
        self.backend, self.at = backend, 0
        self.groups = checkpoint.spec.kv_groups
        backend.load(load_model(checkpoint, backend))
        blocks = -(-tokens // BLOCK_SIZE)
        self.table = np.random.default_rng(0).permutation(blocks).tolist()
        backend.reserve_kv(blocks * len(self.groups), BLOCK_SIZE, 1, self.groups)

    def logits(self, tokens: list[int]) -> np.ndarray:
        batch = greedy_batch([Chunk(tokens, self.at, self.table)])
        self.at += len(tokens)
        windows = [group.window for group in self.groups]
        return self.backend.logits(with_groups(batch, windows, BLOCK_SIZE, behind=BEHIND))


def chunks(tokens: list[int], seed: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(seed)
    while tokens:
        count = int(rng.integers(1, LONGEST + 1))
        yield tokens[:count]
        tokens = tokens[count:]


def error(got: np.ndarray, expected: dict[str, np.ndarray]) -> float:
    """Returns the largest difference at the golden's positions, of those that were computed."""
    known = expected["positions"] < len(got)
    return float(np.abs(got[expected["positions"][known]] - expected["logits"][known]).max())


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_greedy_steps_are_those_of_transformers(name: str, tmp_path: Path):
    expected = golden(name)
    tokens, steps = expected["tokens"].tolist(), expected.get("steps", ())
    checkpoint = opened(name, tmp_path, expected["weights"])
    sequence = Sequence(CpuBackend(2, kv="f32"), checkpoint, len(tokens) + len(steps))
    parts = [tokens] if checkpoint.spec.encoder else chunks(tokens, crc32(name.encode()))
    got = np.concatenate([sequence.logits(part) for part in parts])
    assert error(got, expected) < TOLERANCE
    last = got[-1]
    for step in steps:
        assert np.abs(last - step).max() < TOLERANCE
        assert last.argmax() == step.argmax()
        [last] = sequence.logits([int(last.argmax())])


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_computes_the_same(name: str, tmp_path: Path):
    expected = golden(name)
    checkpoint = opened(name, tmp_path, expected["weights"])
    tokens = expected["tokens"].tolist()
    parts = [tokens] if checkpoint.spec.encoder else chunks(tokens[:FEW], crc32(name.encode()))
    sequence = Sequence(RefBackend(), checkpoint, len(tokens))
    got = np.concatenate([sequence.logits(part) for part in parts])
    assert error(got, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["modernbert_five_heads", "modernbert_window"])
def test_a_gguf_file_of_modernbert_computes_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """llama.cpp computes the same embeddings of such files, within 1e-6."""
    monkeypatch.setattr("penstock.text.gguf_export.text_keys", lambda path, size: {"tokenizer.ggml.model": "none"})
    expected = golden(name)
    opened(name, tmp_path, expected["weights"])
    made = export(tmp_path, "f32", lambda tensor, format: quantize(tensor, format, threads=1))
    write_gguf(tmp_path / "model.gguf", made.keys, made.tensors, lambda name, size: None)
    tokens = expected["tokens"].tolist()
    sequence = Sequence(RefBackend(), open_checkpoint(tmp_path / "model.gguf"), len(tokens))
    assert error(sequence.logits(tokens), expected) < TOLERANCE


def test_weights_depend_on_names_alone():
    """Changing how they are made would make every golden wrong."""
    wanted = np.array([[0.163558, -0.448383]])
    assert np.allclose(random_weight("model.embed_tokens.weight", (1, 2)), wanted, atol=1e-5)
    assert abs(random_weight("model.norm.weight", (200,)).mean() - 1) < 0.05
