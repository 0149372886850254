"""Models whose weights stay quantized, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend import open_backend
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.fp8_weights import RowScaledFp8
from penstock.backend.cuda.quantized_weights import QuantizedMatrix
from penstock.backend.cuda.weights import DenseMatrix
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import attention, difference
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.model.families.llama import build
from penstock.model.random_tensor import random_tensor
from penstock.model.roles import Role
from penstock.model.spec import ModelSpec
from tests.cuda.device import DEVICE, HALF, ints

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
SMALL = ModelSpec("llama", 1, 64, 96, 40, 512, 1e-5, attention(4, 2, 16, interleaved=True))
WIDE = ModelSpec("llama", 1, 256, 256, 40, 512, 1e-5, attention(4, 1, 64, interleaved=True))
CLOSE = 3e-2


class RandomPacker:
    """Random tensors in place of a checkpoint's, in formats that change from part to part."""

    def __init__(self, backend: Any, formats: Sequence[str]) -> None:
        self._backend = backend
        self._formats = formats
        self._rng = np.random.default_rng(0)
        self._made = 0

    def vector(self, name: str, size: int, plus: float = 0.0) -> Any:
        gains = random_tensor(self._rng, "F32", size)
        gains.data.view(np.float32)[:] /= 32  # so that no sum is beyond 16 bits
        return self._backend.pack_vector(gains)

    def matrix(self, *parts: tuple[str, int], width: int) -> Any:
        tensors = [random_tensor(self._rng, self._next_format(), rows, width) for _, rows in parts]
        return self._backend.pack_matrix(tensors, [None] * len(parts))

    def _next_format(self) -> str:
        self._made += 1
        return self._formats[self._made % len(self._formats)]


def backend_of(quantize: str = "") -> CudaBackend:
    return CudaBackend(64, 32, device=DEVICE, dtype=HALF, quantize=quantize)


def logits(backend: Any, tokens: Sequence[int]) -> np.ndarray:
    """Of sequences of one token: where random weights attend to several, rounding decides which."""
    backend.reserve_kv(len(tokens), 4)
    return backend.logits(greedy_batch([Chunk([token], 0, [row], row) for row, token in enumerate(tokens)]))


@pytest.mark.parametrize(
    ("spec", "formats"),
    [(SMALL, ["Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1"]), (SMALL, ["Q8_0"]), (WIDE, ["Q4_K", "Q4_K", "Q6_K", "Q5_K"])],
    ids=["plain", "bytes", "k"],
)
def test_model_follows_the_reference(spec: ModelSpec, formats: Sequence[str]) -> None:
    backend, reference = backend_of(), RefBackend()
    for each in (backend, reference):
        each.load(build(spec, RandomPacker(each, formats)))
    for count in (1, 20):
        tokens = np.random.default_rng(count).integers(spec.vocab, size=count).tolist()
        assert difference(logits(backend, tokens), logits(reference, tokens)) < CLOSE


def packed(formats: Sequence[str], rows: Sequence[int], quantize: str = "", width: int = 256) -> Any:
    rng = np.random.default_rng(0)
    parts = [random_tensor(rng, name, count, width) for name, count in zip(formats, rows, strict=True)]
    parts = [replace(part, role=Role.MLP_IN) for part in parts]
    return backend_of(quantize).pack_matrix(parts, [None] * len(parts))


def test_neighbours_of_one_format_are_one_matrix() -> None:
    assert [part.rows for part in packed(["Q4_K", "Q4_K", "Q6_K"], [64, 32, 16]).parts] == [96, 16]
    assert [part.rows for part in packed(["Q8_0", "Q8_0"], [24, 32]).parts] == [24, 32]


def test_formats_without_a_kernel_become_plain_values(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(packed(["Q4_K", "F16"], [16, 16]), DenseMatrix)
    assert "F16 and Q4_K become" in caplog.text


def test_what_is_not_quantized_is_said(caplog: pytest.LogCaptureFixture) -> None:
    packed(["Q4_K"], [16], "int4")
    packed(["F32"], [16], "fp8", width=96)
    assert "Q4_K stay as they are: int4 is for plain ones" in caplog.text
    assert "rows of 96 stay as they are" in caplog.text


def test_plain_values_are_quantized_when_asked_for() -> None:
    assert isinstance(packed(["F32"], [16]), DenseMatrix)
    assert isinstance(packed(["F16", "F32"], [16, 5], "fp8"), RowScaledFp8)
    assert isinstance(packed(["BF16"], [16], "int4"), QuantizedMatrix)
    assert isinstance(packed(["Q4_K"], [16], "fp8"), QuantizedMatrix)
    assert isinstance(packed(["F32"], [16], "fp8", width=96), DenseMatrix)


def test_float8_rows_can_be_gathered() -> None:
    weight = packed(["F32"], [40], "fp8")
    out = torch.full((3, 256), torch.nan, device=DEVICE)
    weight.gather(ints([39, 0, 8]), out)
    values = weight.weight.values.float() * weight.weight.scales[:, None]
    assert torch.allclose(out, values[[39, 0, 8]], rtol=1e-6)


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(ConfigError, match="'int3'"):
        backend_of("int3")
    with pytest.raises(ConfigError, match="fp8 needs a GPU"):
        open_backend(Config(model="", device="cpu", quantize="fp8"))
