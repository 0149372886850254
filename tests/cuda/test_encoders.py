"""Encoders: whole texts of several lengths in one step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backend.cuda import CudaBackend
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import difference
from penstock.engine.assemble import assemble
from penstock.model.load import load_model, open_checkpoint
from penstock.types import Finished, Limits, Request, SamplingParams
from tests.cuda.device import DEVICE, HALF

ENCODERS = Path(__file__).parents[1] / "models" / "encoders"
LIMITS = Limits(max_len=64, max_rows=8, step_tokens=128, block_size=16, num_blocks=24, vocab=61, dim=32, encoder=True)


def pooled(backend: CudaBackend | RefBackend, path: Path, prompts: list[list[int]], kind: str) -> np.ndarray:
    backend.load(load_model(open_checkpoint(path), backend))
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    engine = assemble(backend, LIMITS, depth=backend.depth)
    for id, prompt in enumerate(prompts):
        engine.add(Request(id, tuple(prompt), SamplingParams(), 0, pooling=kind))
    found: dict[int, np.ndarray] = {}
    while not engine.idle:
        for event in engine.step():
            assert isinstance(event, Finished), event
            found[event.seq] = np.frombuffer(event.pooled, "<f4")
    return np.stack([found[id] for id in range(len(prompts))])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 3e-2)], ids=["f32", "half"])
@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("bert", "mean"),
        ("bert/model.gguf", "last"),
        ("roberta", "cls"),
        ("nomic", "mean"),
        ("distilbert", "mean"),
        ("mpnet", "mean"),
    ],
)
def test_states_are_those_of_transformers(file: str, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    with np.load((ENCODERS / file.split("/")[0]) / "expected.npz") as stored:
        tokens, states = stored["tokens"].tolist(), stored["states"]
    prompts = [tokens, tokens[:1], tokens[3:20], tokens[::-1], tokens[:16], tokens[10:43]]
    backend = CudaBackend(LIMITS.step_tokens, LIMITS.max_rows, device=DEVICE, dtype=dtype)
    got = pooled(backend, ENCODERS / file, prompts, kind)
    wanted = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[kind]
    assert difference(got[0], wanted) < tolerance
    assert difference(got, pooled(RefBackend(), ENCODERS / file, prompts, kind)) < tolerance
