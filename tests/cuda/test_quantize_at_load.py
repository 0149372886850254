"""Plain weights that take a file's format while they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.device import DEVICE as DEVICE_KIND
from penstock.backend.cuda.storage import StorageRules, storage_of
from penstock.backend.cuda.weights import DenseMatrix
from penstock.backend.quantize_at_load import may_quantize, quantized
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import difference
from penstock.config import Config
from penstock.model.load import load_model, open_checkpoint
from penstock.model.roles import MLA, Role
from tests.cuda.device import DEVICE, HALF

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
GOLDEN = GOLDENS / "qwen2"


@pytest.mark.parametrize("to", ["q8_0", "q4_k"])
def test_the_gpu_computes_with_the_same_weights(to: str) -> None:
    plain = open_checkpoint(GOLDEN)
    loaded = quantized(plain, Config(model=str(GOLDEN), device="cuda", quantize=to, threads=2))
    reference, backend = RefBackend(), CudaBackend(64, 4, device=DEVICE, dtype=HALF)
    answers = []
    for each in (reference, backend):
        each.load(load_model(loaded, each))
        each.reserve_kv(8, 16)
        answers.append(each.logits(greedy_batch([Chunk(list(range(12)), 0, range(1))])))
    wanted, got = answers
    assert difference(got, wanted) < 5e-2
    assert np.isfinite(got).all()
    matrices = [name for name, tensor in plain.tensors.items() if len(tensor.shape) > 1]
    bits = [sum(backend.stored_as(each.tensors[name]).bits for name in matrices) for each in (loaded, plain)]
    assert bits[0] < 0.6 * bits[1], "bytes would count padding: this model's rows fill half a tile"


class Recorder(CudaBackend):
    """Remembers what each tensor was packed as."""

    def __init__(self, quantize: str) -> None:
        super().__init__(64, 4, device=DEVICE, dtype=HALF, quantize=quantize)
        self.packed: dict[str, Any] = {}

    def pack_matrix(self, parts: Any, bias: Any) -> Any:
        weight = super().pack_matrix(parts, bias)
        self.packed |= {part.name: (part, weight) for part in parts}
        return weight


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
@pytest.mark.parametrize("file", ["", "model.gguf"])
@pytest.mark.parametrize("name", ["qwen3next", "qwen3_moe", "gpt2", "deepseek_v2"])
def test_a_gpu_quantizes_what_the_table_allows(name: str, file: str, quantize: str) -> None:
    checkpoint, backend = open_checkpoint(GOLDENS / name / file), Recorder(quantize)
    load_model(checkpoint, backend)
    roles = {part.role for part, _ in backend.packed.values()}
    assert roles >= {Role.EMBEDDING, Role.ATTENTION_OUT}
    assert (Role.SHARED_EXPERT_GATE in roles) == (name == "qwen3next")
    assert (Role.POSITIONS in roles) == (name == "gpt2")
    for part, weight in backend.packed.values():
        fits = quantize == "int4" or weight.width % 64 == 0
        allowed = may_quantize(part, DEVICE_KIND)
        assert isinstance(weight, DenseMatrix) != (allowed and fits), part.name
        stored = storage_of(part, StorageRules(quantize)).kind
        assert (stored == quantize) == (allowed and fits), part.name
    for tensor in checkpoint.tensors.values():
        assert tensor.role not in MLA or storage_of(tensor, StorageRules(quantize)).kind == "BF16"


def test_a_model_with_fp8_experts_answers_nearly_the_same() -> None:
    """One token has its experts by pairs, and a prompt by blocks."""
    checkpoint, answers = open_checkpoint(GOLDENS / "qwen3_moe"), []
    for quantize in ("", "fp8"):
        backend = CudaBackend(64, 4, device=DEVICE, dtype=HALF, quantize=quantize)
        backend.load(load_model(checkpoint, backend))
        backend.reserve_kv(8, 16)
        chunks = Chunk(list(range(12)), 0, range(1)), Chunk([12], 12, range(1))
        answers.append(np.concatenate([backend.logits(greedy_batch([chunk])) for chunk in chunks]))
    assert 1e-4 < difference(*answers) < 0.2
