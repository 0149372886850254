"""Quantized matrices: packed and read again, and multiplied by each kernel, against the reference's values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.backend.cuda.kernels import quant_gemm, quant_gemm_small, quant_gemv
from penstock.backend.cuda.kernels.dequantize import dequantize_matrix, dequantize_rows
from penstock.backend.cuda.kernels.fp8 import Fp8Weight, cublas_fp8_gemm, fp8_gemm_small, quantize_fp8
from penstock.backend.cuda.kernels.fp8_activations import quantize_activations
from penstock.backend.cuda.kernels.fp8_gemm import fp8_gemm
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from penstock.backend.cuda.pack_quantized import CODINGS, QuantizedWeight, pack, quantize_int4
from penstock.backend.cuda.quantized_weights import QuantizedMatrix, Workspace
from penstock.backend.cuda.storage import CODE_BITS
from penstock.backend.cuda.transfer import Transfer
from penstock.model.dequantize import dequantize
from penstock.model.random_tensor import random_tensor
from penstock.model.tensor import AFFINE, FORMATS, STORAGE, Tensor
from tests.cuda.device import DEVICE, TILINGS, ints, normal
from tests.small_scales import CODES, weight_of_every_scale

FILE_FORMATS = [name for name in CODINGS if name in FORMATS | AFFINE]
ROWS, WIDTH = 40, 512  # three rows of tiles, of eight each
EXACT = 1e-5  # float32 sums of exact products
HALF = 5e-3  # values rounded to bfloat16; the interpreter cuts them off

formats = pytest.mark.parametrize("name", FILE_FORMATS)
ALIKE = {coding._replace(zero=0, table=coding.table[:1]): name for name, coding in CODINGS.items()}
CODED = [*FILE_FORMATS, "INT4"]  # test_formats.py has the others
if DEVICE == "cpu":  # the interpreter takes long, and another zero or table changes little
    CODED = [name for name in ALIKE.values() if name in CODED]
codings = pytest.mark.parametrize("name", CODED)
gpu_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def random_bytes(name: str, rows: int = ROWS, width: int = WIDTH, seed: int = 0) -> NDArray[np.uint8]:
    return random_tensor(np.random.default_rng(seed), name, rows, width).data


def packed(name: str, rows: int = ROWS, width: int = WIDTH) -> tuple[QuantizedWeight, torch.Tensor]:
    """A matrix, and its values."""
    if name == "INT4":
        weight = quantize_int4(normal(rows, width))
        return weight, expanded(weight)
    data = random_bytes(name, rows, width)
    values = dequantize(Tensor("", STORAGE[name], (rows, width), data))
    return pack(data, name, rows, width, Transfer(torch.device(DEVICE))), torch.from_numpy(values).to(DEVICE)


def expanded(weight: QuantizedWeight) -> torch.Tensor:
    out = torch.full((weight.rows, weight.width), torch.nan, device=DEVICE)
    dequantize_matrix(weight, out)
    return out


def items(count: int, width: int = WIDTH) -> torch.Tensor:
    return normal(count, width, seed=1).bfloat16()


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def empty(count: int, rows: int) -> torch.Tensor:
    return torch.full((count, rows), torch.nan, device=DEVICE)


def scratch() -> SplitKScratch:
    return SplitKScratch.on(torch.device(DEVICE))


@formats
def test_packing_keeps_every_value(name: str) -> None:
    weight, values = packed(name)
    assert difference(expanded(weight), values) < 1e-6


@formats
def test_packing_some_rows_at_a_time_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = packed(name)
    monkeypatch.setattr("penstock.backend.cuda.pack_quantized.CHUNK_VALUES", 16 * WIDTH)
    parts, _ = packed(name)
    for first, second in zip(arrays(whole), arrays(parts), strict=True):
        assert torch.equal(first, second)


def arrays(weight: QuantizedWeight) -> list[torch.Tensor]:
    return [array for array in (weight.low, weight.high, weight.scales, weight.supers) if array is not None]


@formats
def test_packed_weights_take_what_is_said_before(name: str) -> None:
    weight, _ = packed(name)
    assert weight.bytes * 8 == CODE_BITS[name] * 48 * WIDTH  # rows fill tiles of 16


@codings
def test_rows_can_be_gathered(name: str) -> None:
    weight, values = packed(name)
    tokens = [39, 0, 8, 16, 33]
    out = torch.full((5, WIDTH), torch.nan, device=DEVICE)
    dequantize_rows(weight, ints(tokens), out)
    assert difference(out, values[tokens]) < 1e-6


@codings
def test_few_rows(name: str) -> None:
    check_few_rows(name, 1, quant_gemm_small.Tiling(2, 2, 1))


@pytest.mark.parametrize("name", [name for name in CODED if CODINGS[name].groups > 1])
@pytest.mark.parametrize("ahead", [1, 2])
def test_one_row(name: str, ahead: int) -> None:
    weight, values = packed(name, ROWS, 768)
    out = empty(1, ROWS)
    quant_gemv.quant_gemv(items(1, 768), weight, None, out, tiling=quant_gemv.Tiling(2, 1, 1, ahead))
    assert difference(out, items(1, 768).double() @ values.double().T) < EXACT


def test_one_row_gated_with_a_bias() -> None:
    weight, values = packed("Q4_K", 64, 512)
    bias, out = normal(64, seed=2), empty(1, 32)
    quant_gemv.quant_gemv(items(1), weight, bias, out, gated=True, tiling=quant_gemv.Tiling(1, 2, 2, 1))
    left, right = (items(1).double() @ values.double().T + bias).chunk(2, 1)
    assert difference(out, torch.nn.functional.silu(left) * right) < EXACT


@pytest.mark.parametrize(
    "name", ["Q4_K", "Q6_K", "Q8_0", "IQ2_S"]
)  # scales in bytes, groups of 16, codes in bytes, a table
@pytest.mark.parametrize(
    ("count", "tiling"),
    [
        (4, quant_gemm_small.Tiling(1, 4, 2)),
        (5, quant_gemm_small.Tiling(2, 1, 2)),
        (16, quant_gemm_small.Tiling(4, 4, 1)),
    ],
)
def test_few_rows_in_other_tilings(name: str, count: int, tiling: quant_gemm_small.Tiling) -> None:
    check_few_rows(name, count, tiling)


def check_few_rows(name: str, count: int, tiling: quant_gemm_small.Tiling) -> None:
    weight, values = packed(name)
    out = empty(count, ROWS)
    quant_gemm_small.quant_gemm_small(items(count), weight, None, out, tiling=tiling)
    assert difference(out, items(count).double() @ values.double().T) < EXACT


@pytest.mark.parametrize("rows", [64, 96])
def test_few_rows_gated_with_a_bias(rows: int) -> None:
    weight, values = packed("Q4_K", rows, 256)
    bias = normal(rows, seed=2)
    out = empty(3, rows // 2)
    quant_gemm_small.quant_gemm_small(
        items(3, 256), weight, bias, out, gated=True, tiling=quant_gemm_small.Tiling(2, 2, 2)
    )
    left, right = (items(3, 256).double() @ values.double().T + bias).chunk(2, 1)
    assert difference(out, torch.nn.functional.silu(left) * right) < EXACT


@pytest.mark.parametrize("name", ["Q4_0", "Q5_K", "Q6_K", "Q8_0", "INT4", "Q2_K", "IQ4_XS", "NVFP4", "U8_ZERO_64"])
@pytest.mark.parametrize(
    ("count", "tiling"),
    [(20, quant_gemm.Tiling(4, 32, 1, 1, 4, 3)), (33, quant_gemm.Tiling(4, 16, 8, 3, 4, 2))],
    ids=["whole", "split"],
)
def test_many_rows(name: str, count: int, tiling: quant_gemm.Tiling) -> None:
    weight, values = packed(name)
    shared = scratch()
    out = empty(count, ROWS)
    quant_gemm.quant_gemm(items(count), weight, None, out, tiling, shared)
    assert difference(out, items(count).double() @ values.double().T) < HALF
    assert not shared.arrived.any()


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_odd_shapes(name: str) -> None:
    """Rows that leave a tile half empty, columns that leave one half empty, a matrix within a wider result."""
    weight, values = packed(name, 41, 96)
    for count in (2, 20):
        wide = empty(count, 50)
        QuantizedMatrix((weight,), None, Workspace(scratch(), 20, TILINGS)).product(items(count, 96), wide[:, 4:45])
        assert difference(wide[:, 4:45], items(count, 96).double() @ values.double().T) < HALF
        assert wide[:, :4].isnan().all()
        assert wide[:, 45:].isnan().all()


def test_the_library_multiplies_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backend.cuda.quantized_weights.QUANT_GEMM_ROWS", 16)
    weight, values = packed("Q4_K", 64, 256)
    out = empty(40, 64).bfloat16()
    QuantizedMatrix((weight,), normal(64), Workspace(scratch(), 40, TILINGS)).product(items(40, 256), out)
    assert difference(out, items(40, 256).double() @ values.double().T + normal(64)) < 2 * HALF


@pytest.mark.parametrize("format", CODES)
def test_every_scale_of_8_bits_is_read_as_defined(format: str) -> None:
    tensor = weight_of_every_scale(format)
    weight = pack(tensor.data, format, *tensor.shape, Transfer(torch.device(DEVICE)))
    assert np.array_equal(expanded(weight).cpu(), dequantize(tensor))


@pytest.mark.parametrize("count", [1, 3, 20, 40])
def test_a_factor_multiplies_products_before_they_are_rounded(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float16 would not hold products without it."""
    monkeypatch.setattr("penstock.backend.cuda.quantized_weights.QUANT_GEMM_ROWS", 32)
    blocks = np.random.default_rng(0).integers(0, 255, (32 * 256 // 64, 36), np.uint8)
    blocks[:, :4] = 0x7E  # 448, the largest
    tensor = Tensor("", STORAGE["NVFP4"], (32, 256), blocks.reshape(-1))
    weight = pack(tensor.data, "NVFP4", 32, 256, Transfer(torch.device(DEVICE)), factor=3e-4)
    bias, x, out, gated = normal(32), 20 * items(count, 256), empty(count, 32), empty(count, 16)
    out = out.half() if count <= 32 else out  # cuBLAS gives no float16 of bfloat16
    matrix = QuantizedMatrix((weight,), bias, Workspace(scratch(), 40, TILINGS))
    matrix.product(x, out)
    unscaled = torch.from_numpy(x.double().cpu().numpy() @ dequantize(tensor).astype(np.float64).T)
    wanted = unscaled * 3e-4 + bias.cpu()
    assert unscaled.abs().max() > 65504
    assert difference(out.cpu(), wanted) < HALF
    matrix.gated(x, gated, empty(count, 32))
    left, right = wanted.chunk(2, 1)
    assert difference(gated.cpu(), torch.nn.functional.silu(left) * right) < HALF


def test_int4_is_as_close_as_four_bits_allow() -> None:
    values = normal(64, 200)
    weight = quantize_int4(values)
    assert difference(expanded(weight), values) < 0.11
    flat = torch.full((16, 64), 0.25, device=DEVICE)
    assert torch.equal(expanded(quantize_int4(flat)), flat)


# ---- float8 ----


def float8_matrix(rows: int = 96, width: int = 640) -> tuple[Fp8Weight, torch.Tensor]:
    weight = quantize_fp8(normal(rows, width) * 0.02)
    return weight, weight.values.double() * weight.scales.double()[:, None]


def test_float8_uses_its_whole_range() -> None:
    weight, values = float8_matrix()
    assert weight.values.float().abs().amax(1).eq(448).all()
    assert difference(values, normal(96, 640) * 0.02) < 0.03


@pytest.mark.parametrize(
    ("count", "tiling"),
    [
        (1, quant_gemm_small.Tiling(2, 1, 1)),
        (3, quant_gemm_small.Tiling(1, 4, 2)),
        (16, quant_gemm_small.Tiling(4, 2, 1)),
    ],
)
def test_float8_few_rows(count: int, tiling: quant_gemm_small.Tiling) -> None:
    weight, values = float8_matrix()
    x = items(count, 640)
    out = empty(count, 96)
    fp8_gemm_small(x, weight, normal(96), out, tiling=tiling)
    assert difference(out, x.double() @ values.T + normal(96)) < EXACT


def test_float8_few_rows_gated() -> None:
    weight, values = float8_matrix()
    out = empty(2, 48)
    fp8_gemm_small(items(2, 640), weight, None, out, gated=True, tiling=quant_gemm_small.Tiling(2, 2, 2))
    left, right = (items(2, 640).double() @ values.T).chunk(2, 1)
    assert difference(out, torch.nn.functional.silu(left) * right) < EXACT


@gpu_only
def test_float8_of_the_smallest_values() -> None:
    """Their exponent is 0; the interpreter cannot read them."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)[torch.randint(0, 8, (32, 512), device=DEVICE)]
    weight = Fp8Weight(codes.view(torch.float8_e4m3fn), torch.ones(32, device=DEVICE))
    out = empty(2, 32)
    fp8_gemm_small(items(2, 512), weight, None, out)
    assert difference(out, items(2, 512).double() @ weight.values.double().T) < EXACT


def test_float8_rows_are_quantized_each_by_its_largest_value() -> None:
    x = items(5, 640) * torch.tensor([1, 10, 0.01, 0, 3], device=DEVICE)[:, None].bfloat16()
    codes, scales = float8_rows(x)
    assert difference(codes.float() * scales[:, None], x) < (0.07 if DEVICE == "cpu" else 0.03)
    assert torch.allclose(scales[[0, 1, 2, 4]] * 448, x.float().abs().amax(1)[[0, 1, 2, 4]])


def float8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.empty(len(x), device=DEVICE)
    quantize_activations(x, codes, scales)
    return codes, scales


@pytest.mark.parametrize("tiling", [quant_gemm.Tiling(4, 32, 2, 1, 4, 3), quant_gemm.Tiling(4, 16, 1, 3, 4, 3)])
def test_float8_many_rows(tiling: quant_gemm.Tiling) -> None:
    weight, values = float8_matrix()
    codes, scales = float8_rows(items(20, 640))
    shared = scratch()
    out = empty(20, 96)
    fp8_gemm(codes, scales, weight, normal(96), out, tiling, shared)
    wanted = (codes.double() * scales.double()[:, None]) @ values.T + normal(96)
    assert difference(out, wanted) < (EXACT if DEVICE == "cpu" else 1e-3)
    assert not shared.arrived.any()


@gpu_only
def test_float8_of_the_library() -> None:
    weight, values = float8_matrix()
    codes, scales = float8_rows(items(32, 640))
    out = empty(32, 96).bfloat16()
    cublas_fp8_gemm(codes, scales, weight, None, out)
    assert difference(out, (codes.double() * scales.double()[:, None]) @ values.T) < HALF
