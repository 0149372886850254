"""Plain weights that take a file's format while they are loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.quantize_at_load import quantized
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import difference
from penstock.config import Config
from penstock.model.load import load_model, open_checkpoint
from tests.cuda.device import DEVICE, HALF

GOLDEN = Path(__file__).parents[1] / "models" / "goldens" / "qwen2"


@pytest.mark.parametrize("to", ["q8_0", "q4_k"])
def test_the_gpu_computes_with_the_same_weights(to: str) -> None:
    plain = open_checkpoint(GOLDEN)
    loaded = quantized(plain, Config(model=str(GOLDEN), device="cuda", quantize=to, threads=2))
    reference, backend = RefBackend(), CudaBackend(64, 4, device=DEVICE, dtype=HALF, graphs=False)
    answers = []
    for each in (reference, backend):
        each.load(load_model(loaded, each))
        each.reserve_kv(8, 16)
        answers.append(each.logits(greedy_batch([Chunk(list(range(12)), 0, range(1))])))
    wanted, got = answers
    assert difference(got, wanted) < 5e-2
    assert np.isfinite(got).all()
    weights = [backend.footprint(plain.spec, each.tensors.values()).weights for each in (loaded, plain)]
    assert weights[0] < 0.7 * weights[1]
