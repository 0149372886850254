"""Each kernel against a few lines of torch, on shapes that are powers of two and on others."""

from __future__ import annotations

import pytest
import torch

from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations, fp8_view, quantize_activations
from penstock.backend.cuda.kernels.gather_rows import gather_rows, resolve_tokens
from penstock.backend.cuda.kernels.gemv import Tiling as RowTiling
from penstock.backend.cuda.kernels.gemv import gemv
from penstock.backend.cuda.kernels.norm import add_layer_norm, add_norm
from penstock.backend.cuda.kernels.silu_and_mul import act_and_mul
from penstock.backend.cuda.kernels.skinny_gemm import Tiling, skinny_gemm
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from tests.cuda.device import DEVICE, HALF, close, ints, normal

DTYPES = [torch.float32, HALF]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "half"])


@dtypes
@pytest.mark.parametrize("dim", [33, 576, 4096])
def test_add_norm(dim: int, dtype: torch.dtype) -> None:
    x, residual = normal(3, dim, dtype=dtype), normal(3, dim, dtype=dtype, seed=1)
    gain = normal(dim, seed=2)
    out, total = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    add_norm(x, residual, gain, 1e-5, out, total)
    wanted = x.double() + residual.double()
    assert close(total, wanted)
    assert close(out, wanted / (wanted.square().mean(1, keepdim=True) + 1e-5).sqrt() * gain)

    add_norm(x, None, gain, 1e-5, out, None)
    assert close(out, x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt() * gain)


@dtypes
@pytest.mark.parametrize("dim", [33, 576, 4096])
def test_add_layer_norm(dim: int, dtype: torch.dtype) -> None:
    x, residual = normal(3, dim, dtype=dtype) + 5, normal(3, dim, dtype=dtype, seed=1)
    gain, bias = normal(dim, seed=2), normal(dim, seed=3)
    out, total = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    add_layer_norm(x, residual, gain, bias, 1e-5, out, total)
    wanted = x.double() + residual.double()
    about = gain.double(), bias.double(), 1e-5
    assert close(total, wanted)
    assert close(out, torch.nn.functional.layer_norm(wanted, (dim,), *about))

    add_layer_norm(x, None, gain, bias, 1e-5, out, None)
    assert close(out, torch.nn.functional.layer_norm(x.double(), (dim,), *about))


def test_the_sum_may_replace_the_residual() -> None:
    x, residual = normal(2, 64), normal(2, 64, seed=1)
    wanted = x + residual
    add_norm(x, residual, normal(64), 1e-5, torch.empty_like(x), residual)
    assert torch.equal(residual, wanted)


@dtypes
@pytest.mark.parametrize("hidden", [33, 1536, 3000])
def test_gate(hidden: int, dtype: torch.dtype) -> None:
    x = normal(3, 2 * hidden, dtype=dtype) * 20
    out = torch.full((3, hidden), torch.nan, dtype=dtype, device=DEVICE)
    act_and_mul(x, out)
    left, right = x.double().chunk(2, dim=1)
    assert close(out, torch.nn.functional.silu(left) * right)


def test_rows_are_made_as_codes() -> None:
    """What a kernel stores as float8 is what it would store as it is, quantized."""
    x, residual, gain = normal(3, 192, dtype=HALF), normal(3, 192, dtype=HALF, seed=1), normal(192, seed=2)
    out, total, unused = torch.empty_like(x), torch.empty_like(x), torch.zeros_like(x)
    codes = fp8_view(torch.empty_like(x))
    add_norm(x, residual, gain, 1e-5, out, total)
    add_norm(x, residual, gain, 1e-5, unused, total, codes)
    assert follows(codes, out)

    add_layer_norm(x, residual, gain, gain, 1e-5, out, total)
    add_layer_norm(x, residual, gain, gain, 1e-5, unused, total, codes)
    assert follows(codes, out)

    wide = normal(3, 384, dtype=HALF)
    act_and_mul(wide, out)
    act_and_mul(wide, unused, codes)
    assert follows(codes, out)
    assert not unused.any()


def follows(codes: Fp8Activations, rows: torch.Tensor) -> bool:
    """No further than a step of e4m3 from rows that are quantized afterwards."""
    later = fp8_view(torch.empty_like(rows))
    quantize_activations(rows, *later)
    got, wanted = (of.values.float() * of.scales[:, None] for of in (codes, later))
    return bool(((got - wanted).abs() <= wanted.abs() / 7 + later.scales[:, None] / 256).all())


def test_known_tokens() -> None:
    out = ints([-9] * 5)
    resolve_tokens(ints([3, -1, 0, -1, 7]), ints([0, 2, 2, 1, 1]), ints([10, 11, 12]), out)
    assert out.tolist() == [3, 12, 0, 11, 7]
    resolve_tokens(ints([3, -1, 0, -1, 7]), ints([0, 2, 2, 1, 1]), ints([1, 0, 2]), out, token_ids=ints([40, 50, 60]))
    assert out.tolist() == [3, 60, 0, 40, 7]


@dtypes
def test_take_rows(dtype: torch.dtype) -> None:
    source = normal(9, 1500, dtype=dtype)
    out = torch.full((4, 1500), torch.nan, dtype=dtype, device=DEVICE)
    gather_rows(source, ints([8, 0, 0, 3]), out)
    assert torch.equal(out, source[[8, 0, 0, 3]])


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    y = x.double() @ weight.double().t()
    y = y if bias is None else y + bias.double()
    left, right = y.chunk(2, dim=1)
    return torch.nn.functional.silu(left) * right if gated else y


SHAPES = [(48, 64), (576, 576), (37 * 2, 33), (2, 512), (96, 1600)]


@dtypes
@pytest.mark.parametrize(("biased", "gated"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_gemv(rows: int, width: int, biased: bool, gated: bool, dtype: torch.dtype) -> None:
    x, weight = normal(1, width, dtype=dtype), normal(rows, width, dtype=dtype, seed=1) * width**-0.5
    bias = normal(rows, seed=2) if biased else None
    out = torch.full((1, rows // 2 if gated else rows), torch.nan, dtype=dtype, device=DEVICE)
    gemv(x, weight, bias, out, gated=gated, tiling=RowTiling(4, 256, 4))
    assert close(out, product(x, weight, bias, gated))


@dtypes
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_skinny(rows: int, width: int, gated: bool, dtype: torch.dtype) -> None:
    scratch = SplitKScratch.on(torch.device(DEVICE))
    for count, biased, split in [(2, False, 1), (17, True, 3)]:
        x, weight = normal(count, width, dtype=dtype), normal(rows, width, dtype=dtype, seed=1) * width**-0.5
        bias = normal(rows, seed=2) if biased else None
        out = torch.full((count, rows // 2 if gated else rows), torch.nan, dtype=dtype, device=DEVICE)
        skinny_gemm(x, weight, bias, out, Tiling(64, 64, split, 4, 3), scratch, gated=gated)
        assert close(out, product(x, weight, bias, gated))
        assert not scratch.arrived.any()


def test_products_may_be_wider_than_their_inputs() -> None:
    x, weight = normal(3, 64, dtype=HALF), normal(32, 64, dtype=HALF, seed=1)
    out = torch.zeros((3, 32), device=DEVICE)
    skinny_gemm(x, weight, None, out, Tiling(64, 64, 1, 4, 3), SplitKScratch.on(torch.device(DEVICE)))
    assert close(out, product(x, weight, None, False))
    gemv(x[:1], weight, None, out[:1])
    assert close(out, product(x, weight, None, False))
