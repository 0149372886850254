"""The product that only Hopper can run, against float64."""

from __future__ import annotations

import pytest
import torch

from penstock.backend.cuda.kernels.fp8 import quantize_fp8
from penstock.backend.cuda.kernels.fp8_activations import fp8_view, quantize_activations
from penstock.backend.cuda.kernels.hopper_gemm import Tiling, hopper_gemm
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from tests.cuda.device import DEVICE, HOPPER, normal

pytestmark = pytest.mark.skipif(not HOPPER.device.has_hopper_gemm, reason="needs a Hopper GPU")
SHAPES = [(1000, 320, False), (448, 576, True), (256, 1024, False)]
if DEVICE == "cuda":  # in the interpreter they take minutes
    SHAPES += [(6144, 4096, False), (1024, 14336, False), (2048, 4096, True)]


def gated_or_not(y: torch.Tensor, gated: bool) -> torch.Tensor:
    left, right = y.chunk(2, 1)
    return torch.nn.functional.silu(left) * right if gated else y


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("count", [1, 3, 8, 33, 64, 100, 128])
@pytest.mark.parametrize(("rows", "width", "gated"), SHAPES)
def test_values_of_16_bits(rows: int, width: int, gated: bool, count: int) -> None:
    weight, bias = normal(rows, width, dtype=torch.bfloat16) * 0.02, normal(rows, seed=1)
    x = normal(count, width, dtype=torch.bfloat16, seed=2)
    wanted = gated_or_not(x.double() @ weight.double().t() + bias, gated)
    scratch = SplitKScratch.on(torch.device(DEVICE))
    split = 4 if -(-width // 64) % 4 == 0 else 1
    chosen = HOPPER.hopper_gemm(count, int(wanted.shape[1]), width, 2, gated)
    for tiling in {chosen, Tiling(1, 3, 3), Tiling(split, 1, 3)}:
        out = torch.full(wanted.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
        hopper_gemm(x, weight, bias, out, tiling, scratch, gated=gated)
        assert difference(out, wanted) < 4e-3
        assert not scratch.arrived.any()


@pytest.mark.parametrize("count", [1, 16, 64, 128])
@pytest.mark.parametrize(("rows", "width", "gated"), SHAPES)
def test_values_of_8_bits(rows: int, width: int, gated: bool, count: int) -> None:
    weight = quantize_fp8(normal(rows, width))
    x = normal(count, width, dtype=torch.bfloat16, seed=2)
    codes = fp8_view(torch.empty_like(x))
    quantize_activations(x, *codes)
    values = weight.values.double() * weight.scales[:, None]
    wanted = gated_or_not((codes.values.double() * codes.scales[:, None]) @ values.t(), gated)
    out = torch.full(wanted.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
    tiling = HOPPER.hopper_gemm(count, out.shape[1], width, 1, gated)
    scales = {"scales": weight.scales, "item_scales": codes.scales}
    hopper_gemm(
        codes.values, weight.values, None, out, tiling, SplitKScratch.on(torch.device(DEVICE)), gated=gated, **scales
    )
    assert difference(out, wanted) < 6e-3
