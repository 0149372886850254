"""Quantized safetensors on a GPU: kept as they are where kernels read them, and else widened with a word about it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.quantized_weights import QuantizedMatrix
from penstock.backend.cuda.weights import DenseMatrix
from penstock.backend.ref.cases import difference
from penstock.model.load import load_model, open_checkpoint
from tests.cuda.device import DEVICE, HALF

FOLDER = Path(__file__).parents[1] / "models" / "formats"
KEPT = ("awq", "gptq", "gptq-3-8", "int8", "bytes", "mxfp4", "nvfp4", "nf4", "w4afp8", "torchao-int4", "mlx-3-6")
MIXED = ("mlx-floats", "torchao")  # q, k and v differ, and are widened to become one matrix
WIDENED = ("gptq-ordered", "mxfp8")


@pytest.mark.parametrize("kind", [*KEPT, *MIXED, *WIDENED])
def test_logits_are_near_those_of_transformers(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    backend = CudaBackend(64, 8, device=DEVICE, dtype=HALF)
    model = load_model(open_checkpoint(FOLDER / kind), backend)
    backend.load(model)
    backend.reserve_kv(8, 4)
    with np.load(FOLDER / kind / "expected.npz") as file:
        tokens, logits = file["tokens"].tolist(), file["logits"]
    got = backend.logits(greedy_batch([Chunk(tokens, 0, range(8))]))
    assert difference(got, logits) < 8e-2  # BF16 alone makes as much
    down = model.layers[0].mlp.part.down
    assert isinstance(down, DenseMatrix if kind in WIDENED else QuantizedMatrix)
    assert ("2 bytes for each value" in caplog.text) == (kind in WIDENED + MIXED)
