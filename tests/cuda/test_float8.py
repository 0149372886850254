"""FP8 checkpoints on a GPU: their own codes and scales in memory, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.fp8_weights import BlockScaledFp8, RowScaledFp8
from penstock.backend.cuda.kernels.fp8_blocks import Tiling, fp8_block_gemm
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from penstock.backend.cuda.weights import DenseMatrix
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import attention
from penstock.model.dequantize import dequantize
from penstock.model.families.llama import build
from penstock.model.load import load_model, open_checkpoint
from penstock.model.random_tensor import random_tensor
from penstock.model.spec import ModelSpec
from penstock.model.tensor import FP8, Scales, Tensor
from tests.cuda.device import DEVICE, HALF, ints, normal

FOLDER = Path(__file__).parents[1] / "models" / "float8"
SPEC = ModelSpec("llama", 1, 256, 320, 40, 512, 1e-5, attention(4, 1, 64, interleaved=False))
EXACT = 3e-5  # the interpreter reads the smallest codes as 0
ROUNDED = 0.06 if DEVICE == "cpu" else 0.03  # activations of 8 bits; the interpreter cuts them off


def random_float8(rng: np.random.Generator, rows: int, width: int, block: tuple[int, int] | None) -> Tensor:
    """No block: one scale for the whole matrix."""
    down, across = block or (rows, width)
    codes = rng.integers(0, 256, (rows, width), dtype=np.uint8) & 0xF7  # none is no number
    scales = rng.uniform(1e-4, 1e-3, (-(-rows // down), -(-width // across))).astype(np.float32)
    return Tensor("random", FP8["F8_E4M3"], (rows, width), codes.reshape(-1), Scales(scales, down, across))


def packed(
    rows: Sequence[int], width: int, block: tuple[int, int] | None, bias: bool = False
) -> tuple[Any, torch.Tensor]:
    """A weight of several parts, and its values."""
    rng = np.random.default_rng(0)
    parts = [random_float8(rng, count, width, block) for count in rows]
    biases = [random_tensor(rng, "F32", count) if bias else None for count in rows]
    backend = CudaBackend(256, 64, device=DEVICE, dtype=HALF)
    weight = backend.pack_matrix(parts, biases)
    backend._packer.target.workspace.transfer.finish()
    return weight, torch.from_numpy(np.concatenate([dequantize(part) for part in parts])).to(DEVICE)


def items(count: int, width: int) -> torch.Tensor:
    return normal(count, width, seed=1).bfloat16()


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def product(weight: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), weight.rows), torch.nan, device=DEVICE)
    weight.product(x, out)
    return out


@pytest.mark.parametrize("block", [None, (1, 256), (128, 256), (128, 128), (16, 128), (1, 128)])
@pytest.mark.parametrize("count", [1, 7, 20])
def test_parts_with_scales_of_their_own(block: tuple[int, int] | None, count: int) -> None:
    weight, values = packed([144, 40, 48], 256, block, bias=True)
    assert isinstance(weight, RowScaledFp8 if block is None or block[1] == 256 else BlockScaledFp8)
    wanted = items(count, 256).double() @ values.double().T + weight.bias
    assert difference(product(weight, items(count, 256)), wanted) < (EXACT if count <= 16 else ROUNDED)


def test_gated_products() -> None:
    weight, values = packed([96, 96], 192, (128, 128))
    out, scratch = (torch.full((3, size), torch.nan, device=DEVICE) for size in (96, 192))
    weight.gated(items(3, 192), out, scratch)
    left, right = (items(3, 192).double() @ values.double().T).chunk(2, 1)
    assert difference(out, torch.nn.functional.silu(left) * right) < EXACT


@pytest.mark.parametrize("tiling", [Tiling(64, 16, 1, 4, 3), Tiling(64, 32, 3, 4, 3), Tiling(128, 16, 2, 8, 3)])
@pytest.mark.parametrize("float8", [False, True])
def test_tilings(tiling: Tiling, float8: bool) -> None:
    weight, values = packed([176], 1000 // 64 * 64, (128, 128))
    x, scales = items(21, 960), None
    if float8:
        x, scales = (x * 30).to(torch.float8_e4m3fn), normal(21).abs()
    out = torch.full((21, 176), torch.nan, device=DEVICE)
    scratch = SplitKScratch.on(torch.device(DEVICE))
    fp8_block_gemm(x, scales, weight.weight, None, out, tiling, scratch)
    wanted = (x.double() * (1 if scales is None else scales.double()[:, None])) @ values.double().T
    assert difference(out, wanted) < (EXACT if DEVICE == "cpu" else 1e-3)
    assert not scratch.arrived.any()


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_rows_can_be_gathered(block: tuple[int, int] | None) -> None:
    weight, values = packed([200], 192, block)
    out = torch.full((3, 192), torch.nan, device=DEVICE)
    weight.gather(ints([199, 0, 130]), out)
    assert torch.allclose(out, values[[199, 0, 130]], rtol=1e-6)


@pytest.mark.parametrize(("width", "block"), [(96, None), (256, (16, 64)), (256, (128, 100))])
def test_shapes_without_a_kernel_become_plain_values(width: int, block: tuple[int, int] | None) -> None:
    weight, values = packed([32], width, block)
    assert isinstance(weight, DenseMatrix)
    assert difference(weight.weight, values) < 5e-3


class RandomPacker:
    def __init__(self, backend: Any, block: tuple[int, int] | None) -> None:
        self._backend = backend
        self._block = block
        self._rng = np.random.default_rng(0)

    def vector(self, name: str, size: int, plus: float = 0.0) -> Any:
        return self._backend.pack_vector(random_tensor(self._rng, "F32", size))

    def matrix(self, *parts: tuple[str, int], width: int) -> Any:
        """Embedding and head as they were."""
        plain = parts[0][0] in ("embed", "head")
        tensors = [
            random_tensor(self._rng, "BF16", rows, width) if plain else self._float8(rows, width) for _, rows in parts
        ]
        return self._backend.pack_matrix(tensors, [None] * len(parts))

    def _float8(self, rows: int, width: int) -> Tensor:
        return random_float8(self._rng, rows, width, self._block)


@pytest.mark.parametrize("block", [None, (1, 320), (128, 128)], ids=["tensor", "channel", "block"])
def test_model_follows_the_reference(block: tuple[int, int] | None) -> None:
    """Sequences of one token: where random weights attend to several, rounding decides which."""
    backend, reference = CudaBackend(64, 32, device=DEVICE, dtype=HALF), RefBackend()
    for each in (backend, reference):
        each.load(build(SPEC, RandomPacker(each, block)))
    for count in (1, 20):
        tokens = np.random.default_rng(count).integers(SPEC.vocab, size=count).tolist()
        batch = greedy_batch([Chunk([token], 0, [row], row) for row, token in enumerate(tokens)])
        answers = []
        for each in (backend, reference):
            each.reserve_kv(count, 4)
            answers.append(each.logits(batch))
        assert np.linalg.norm(answers[0] - answers[1]) < 0.1 * np.linalg.norm(answers[1])


@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_tiny_checkpoints(kind: str) -> None:
    with np.load(FOLDER / kind / "expected.npz") as file:
        tokens, wanted = file["tokens"].tolist(), file["logits"]
    backend = CudaBackend(64, 32, device=DEVICE, dtype=torch.float32)
    backend.load(load_model(open_checkpoint(FOLDER / kind), backend))
    backend.reserve_kv(16, 4)
    assert np.abs(backend.logits(greedy_batch([Chunk(tokens, 0, range(16))])) - wanted).max() < 2e-4
