"""EXL3 weights on a GPU: the bits of their file in memory, against what the format's definition makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.kernels.trellis import Tiling, dequantize_trellis, rotate_inputs, trellis_gemm
from penstock.backend.cuda.trellis_weights import TrellisMatrix
from penstock.model.dequantize import dequantize
from penstock.model.random_tensor import random_tensor
from tests.cuda.device import DEVICE, HALF, normal

EXACT = 2e-3  # rows are rounded to float16
BOOKS = ["3inst", "mcg", "mul1"]


def packed(formats: Sequence[str], rows: Sequence[int], width: int, bias: bool = False) -> tuple[Any, torch.Tensor]:
    """A weight of several parts, and its values."""
    rng = np.random.default_rng(0)
    parts = [random_tensor(rng, format, count, width) for format, count in zip(formats, rows, strict=True)]
    biases = [random_tensor(rng, "F32", count) if bias else None for count in rows]
    backend = CudaBackend(128, 64, device=DEVICE, dtype=HALF)
    weight = backend.pack_matrix(parts, biases)
    backend._workspace.transfer.finish()
    return weight, torch.from_numpy(np.concatenate([dequantize(part) for part in parts])).to(DEVICE)


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def product(weight: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), weight.rows), torch.nan, device=DEVICE)
    weight.product(x, out)
    return out


@pytest.mark.parametrize("code_book", BOOKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_values_are_those_of_the_definition(bits: int, code_book: str) -> None:
    weight, values = packed([f"EXL3-{bits}-{code_book}"], [128], 128)
    out = torch.full((128, 128), torch.nan, device=DEVICE)
    dequantize_trellis(weight.parts[0], out)
    assert difference(out, values) < 5e-4


@pytest.mark.parametrize("count", [1, 20, 65])
def test_parts_have_bits_and_factors_of_their_own(count: int) -> None:
    """65 rows are more than are multiplied without writing the weight out, in bfloat16."""
    weight, values = packed(["EXL3-3-mcg", "EXL3-4-mul1"], [256, 128], 256, bias=True)
    assert isinstance(weight, TrellisMatrix)
    x = normal(count, 256, seed=1).to(HALF)
    wanted = x.double() @ values.double().T + weight.bias
    assert difference(product(weight, x), wanted) < (EXACT if count <= 64 else 5e-3)


@pytest.mark.parametrize("code_book", BOOKS)
def test_columns_are_shared_out(code_book: str) -> None:
    weight, values = packed([f"EXL3-2-{code_book}"], [128], 512)
    part, scratch, x = weight.parts[0], weight.workspace.scratch, normal(3, 512, seed=1).to(HALF)
    rotated, out = torch.empty(3, 512, dtype=torch.float16, device=DEVICE), torch.empty(3, 128, device=DEVICE)
    rotate_inputs(x, part, rotated)
    trellis_gemm(rotated, part, None, out, Tiling(16, 64, 4, 4), scratch)
    assert difference(out, x.double() @ values.double().T) < EXACT
