"""Experts on a GPU: who is chosen, who sits where, and which matrices stay quantized."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.device_properties import INTERPRETER
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.experts import DenseExperts, Fp8Experts, QuantizedExperts, pack_matrices
from penstock.backend.cuda.fp8_weights import RowScaledFp8
from penstock.backend.cuda.kernels.expert_gemm import ExpertRows
from penstock.backend.cuda.kernels.expert_routing import (
    ExpertPermutation,
    combine_experts,
    most_blocks,
    permute_pairs,
    route,
)
from penstock.backend.cuda.quantized_weights import QuantizedMatrix
from penstock.backend.cuda.storage import StorageRules, storage_of
from penstock.backend.cuda.weights import DenseMatrix
from penstock.backend.ref.ops import choose
from penstock.model.dequantize import dequantize
from penstock.model.random_tensor import random_tensor
from penstock.model.roles import Role
from penstock.model.spec import ExpertSpec
from penstock.model.tensor import FP8, Scales, Stack, Tensor
from tests.cuda.device import DEVICE, HALF, close, ints, normal

GROUPED = ExpertSpec(
    12, 3, 16, scoring="sigmoid", renormalize=True, scale=2.5, choice_bias=True, groups=4, top_k_groups=2
)


@pytest.mark.parametrize(
    "spec",
    [
        GROUPED,
        ExpertSpec(12, 5, 16, groups=3, top_k_groups=2, group_score="max"),
        ExpertSpec(12, 4, 16, scoring="softmax_top_k"),
        ExpertSpec(5, 5, 16, renormalize=True),
    ],
    ids=["groups of two", "best groups", "softmax of the chosen", "all"],
)
def test_tokens_choose_as_in_the_reference(spec: ExpertSpec) -> None:
    logits = normal(9, spec.count)
    logits[3] = logits[3, 0]
    logits[4, ::2] = 50
    bias = normal(spec.count, seed=1) if spec.choice_bias else None
    experts, weights = (
        torch.zeros(9, spec.top_k, dtype=torch.int32, device=DEVICE),
        torch.zeros(9, spec.top_k).to(DEVICE),
    )
    route(logits, bias, spec, experts, weights)
    wanted, shares = choose(logits.cpu().numpy(), None if bias is None else bias.cpu().numpy(), spec)
    assert np.array_equal(experts.cpu().numpy(), wanted)
    assert np.allclose(weights.cpu().numpy(), shares, rtol=1e-5)


def test_what_is_no_number_chooses_something() -> None:
    logits = torch.full((2, 12), float("nan"), device=DEVICE)
    experts, weights = (torch.zeros(2, 3, dtype=kind, device=DEVICE) for kind in (torch.int32, torch.float32))
    route(logits, normal(12), GROUPED, experts, weights)
    assert ((experts >= 0) & (experts < 12)).all()


@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_pairs_of_an_expert_sit_beside_each_other(tokens: int) -> None:
    spec, size = ExpertSpec(7, 3, 16), 16
    experts = torch.stack([torch.randperm(6)[:3] for _ in range(tokens)]).int().to(DEVICE)  # nobody's is the last
    permutation = ExpertPermutation.on(torch.device(DEVICE), spec, 700)
    permute_pairs(experts, permutation, size)
    pairs = permutation.pairs[: experts.numel()].cpu().numpy()
    flat = experts.flatten().cpu().numpy()
    assert np.array_equal(pairs, np.argsort(flat, kind="stable"))
    counts = np.bincount(flat, minlength=7)
    used = int(permutation.counts[-1])
    assert used == sum(-(-count // size) for count in counts) <= most_blocks(len(pairs), 7, size)
    seen = []
    for expert, first, count in permutation.blocks[:used].tolist():
        assert (flat[pairs[first : first + count]] == expert).all()
        assert 0 < count <= size
        seen += range(first, first + count)
    assert seen == list(range(len(pairs)))


def test_what_experts_give_is_weighed() -> None:
    given, weights = normal(6, 33), normal(2, 3, seed=1)
    out = torch.empty(2, 33, device=DEVICE)
    combine_experts(given, weights, out)
    assert close(out, (given.view(2, 3, 33) * weights[..., None]).sum(1))


def stacks(format: str, rows: int = 32, bias: bool = False) -> list[Stack]:
    rng = np.random.default_rng(2)
    return [
        Stack(
            [replace(random_tensor(rng, format, rows // 2, 256), role=Role.EXPERT_IN) for _ in range(2)],
            [random_tensor(rng, "F32", rows // 2) if bias else None for _ in range(2)],
        )
        for _ in range(3)
    ]


def fp8_stacks(rows: int, width: int, scaled: tuple[int, int] | None) -> list[Stack]:
    """Stacks of FP8 whose scales are for blocks of so many rows and columns."""
    rng = np.random.default_rng(3)

    def part() -> Tensor:
        codes = torch.from_numpy(rng.normal(size=(rows // 2, width)).astype(np.float32)).to(torch.float8_e4m3fn)
        scales = None
        if scaled:
            down, across = -(-rows // 2 // scaled[0]), -(-width // scaled[1])
            scales = Scales(rng.uniform(0.1, 4, (down, across)).astype(np.float32), *scaled)
        data = codes.view(torch.uint8).numpy().reshape(-1)
        return Tensor("w", FP8["F8_E4M3"], (rows // 2, width), data, role=Role.EXPERT_IN, scales=scales)

    return [Stack([part(), part()], [random_tensor(rng, "F32", rows // 2) for _ in range(2)]) for _ in range(3)]


FP8_SCALES = {
    "none": (32, 256, None),
    "one for a matrix": (32, 256, (16, 256)),
    "one for a row": (40, 192, (1, 192)),
    "blocks of 128": (288, 384, (128, 128)),
    "blocks of 128, and a part of one": (20, 200, (128, 128)),
}


@pytest.mark.parametrize("name", FP8_SCALES)
def test_fp8_experts_stay_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """By pairs, gated, and by blocks, they give what their values in 32 bits do."""
    rows, width, _ = FP8_SCALES[name]
    stacks = fp8_stacks(*FP8_SCALES[name])
    matrices = packed(stacks)
    assert isinstance(matrices, Fp8Experts)
    assert (matrices.weight.dtype, matrices.scales.dim()) == (torch.float8_e4m3fn, 2 if "blocks" in name else 1)
    assert not caplog.records
    check_products(matrices, stacks, rows, width, 1e-5)


def check_products(matrices: Any, stacks: list[Stack], rows: int, width: int, tolerance: float) -> None:
    """Compares products of three experts, by pairs, gated and by blocks, with those of their values in 32 bits."""
    experts = ints([[0, 2], [2, 1], [2, 0], [1, 0], [0, 1]])
    x = normal(5, width, dtype=HALF) * 0.1
    dense = [np.concatenate([dequantize(part) for part in stack.parts]) for stack in stacks]
    bias = [np.concatenate([dequantize(one) for one in stack.bias if one]) for stack in stacks]
    wanted = torch.stack(
        [
            x[pair // 2].float().cpu() @ torch.from_numpy(dense[expert]).T + torch.from_numpy(bias[expert])
            for pair, expert in enumerate(experts.flatten().tolist())
        ]
    )
    alone, together = (torch.zeros(10, rows, dtype=torch.float32, device=DEVICE) for _ in range(2))
    gated = torch.zeros(10, rows // 2, dtype=torch.float32, device=DEVICE)
    permutation = ExpertPermutation.on(torch.device(DEVICE), ExpertSpec(3, 2, 16), 5)
    permute_pairs(experts, permutation, 16)
    matrices.by_pairs(ExpertRows(x, experts, 2), alone)
    matrices.by_pairs(ExpertRows(x, experts, 2), gated, gated=True)
    matrices.by_blocks(ExpertRows(x, experts, 2), permutation, 16, together)
    left, right = wanted.chunk(2, 1)
    for got, exact in ((alone, wanted), (together, wanted), (gated, torch.nn.functional.silu(left) * right)):
        assert float((got.cpu() - exact).abs().max() / exact.abs().max()) < tolerance


def test_fp8_experts_are_widened_where_no_kernel_reads_them(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(packed(fp8_stacks(32, 256, (16, 64))), DenseExperts)
    assert "experts in F8_E4M3 become" in caplog.text
    older = CudaBackend(64, 8, device=DEVICE, dtype=HALF, tilings=Tilings.of(replace(INTERPRETER, capability=(8, 0))))
    stacks = fp8_stacks(32, 256, (16, 256))
    assert isinstance(pack_matrices(stacks, older._packer.target), DenseExperts)


def packed(stacks: list[Stack], quantize: str = "") -> Any:
    backend = CudaBackend(64, 8, device=DEVICE, dtype=HALF, quantize=quantize)
    matrices = pack_matrices(stacks, backend._packer.target)
    backend._packer.target.workspace.transfer.finish()
    return matrices


@pytest.mark.parametrize("format", ["Q5_K", "IQ4_XS", "BF16"])
def test_a_pair_by_itself_and_in_a_block_give_the_same(format: str) -> None:
    matrices = packed(stacks(format, bias=True))
    experts = ints([[0, 2], [2, 1], [2, 0], [1, 0], [0, 1]])
    x, alone, together = (
        normal(5, 256, dtype=HALF) * 0.02,
        *(torch.zeros(10, 32, dtype=HALF, device=DEVICE) for _ in range(2)),
    )
    matrices.by_pairs(ExpertRows(x, experts, 2), alone)
    permutation = ExpertPermutation.on(torch.device(DEVICE), ExpertSpec(3, 2, 16), 5)
    permute_pairs(experts, permutation, 16)
    matrices.by_blocks(ExpertRows(x, experts, 2), permutation, 16, together)
    assert alone.abs().max() > 0
    gated = torch.zeros(10, 16, dtype=HALF, device=DEVICE)
    matrices.by_pairs(ExpertRows(x, experts, 2), gated, gated=True)
    left, right = alone.float().chunk(2, 1)
    wanted = torch.nn.functional.silu(left) * right
    assert float((gated.float() - wanted).abs().max() / wanted.abs().max()) < 2e-2
    assert float((alone.float() - together.float()).abs().max() / alone.float().abs().max()) < 1e-2


def test_formats_stay_quantized_where_rows_fill_tiles(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(packed(stacks("Q4_0")), QuantizedExperts)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert isinstance(packed(stacks("Q4_0", rows=20)), DenseExperts)
    assert "experts in Q4_0 become" in caplog.text
    assert "3.6 times as large" in caplog.text


def test_experts_with_a_factor_each_stay_quantized(caplog: pytest.LogCaptureFixture) -> None:
    """As NVFP4 has them: by pairs, gated, and by blocks, they give what their values in 32 bits do."""
    rng = np.random.default_rng(4)
    scaled = [
        Stack(
            [replace(part, scales=Scales(rng.uniform(1, 30, (1, 1)).astype(np.float32), 16, 256)) for part in parts],
            bias,
        )
        for parts, bias in stacks("NVFP4", bias=True)
    ]
    matrices = packed(scaled)
    assert isinstance(matrices, QuantizedExperts)
    assert storage_of(scaled[0].parts[0], StorageRules())[1:3] == ("NVFP4", 4.5)
    assert "become" not in caplog.text
    check_products(matrices, scaled, 32, 256, 5e-3)


def test_plain_experts_become_four_bits_if_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(packed(stacks("BF16"), "int4"), QuantizedExperts)
    assert isinstance(packed(stacks("BF16", rows=20), "int4"), DenseExperts)
    assert "experts in BF16 do not become int4" in caplog.text


def test_plain_experts_become_fp8_if_that_is_asked_for() -> None:
    plain, made = packed(stacks("BF16", rows=20)), packed(stacks("BF16", rows=20), "fp8")
    assert isinstance(made, Fp8Experts)
    x, experts = normal(2, 256, dtype=HALF) * 0.02, ints([[0, 2], [2, 1]])
    exact, rounded = (torch.zeros(4, 20, dtype=torch.float32, device=DEVICE) for _ in range(2))
    plain.by_pairs(ExpertRows(x, experts, 2), exact)
    made.by_pairs(ExpertRows(x, experts, 2), rounded)
    assert 1e-3 < float((exact - rounded).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
def test_routers_and_gates_of_shared_experts_are_not_quantized(quantize: str) -> None:
    plain = random_tensor(np.random.default_rng(), "BF16", 32, 64)
    kinds = {
        Role.ROUTER: DenseMatrix,
        Role.SHARED_EXPERT_GATE: DenseMatrix,
        Role.POSITIONS: DenseMatrix,
        None: DenseMatrix,
    }
    kinds[Role.MLP_IN] = QuantizedMatrix if quantize == "int4" else RowScaledFp8
    for role, kind in kinds.items():
        tensor = replace(plain, role=role)
        weight = CudaBackend(64, 8, device=DEVICE, dtype=HALF, quantize=quantize).pack_matrix([tensor], [None])
        assert isinstance(weight, kind)
        assert storage_of(tensor, StorageRules(quantize)).kind == ("BF16" if kind is DenseMatrix else quantize)


def test_memory_figures_know_which_experts_are_float8() -> None:
    def tensor(role: Role, format: Any, columns: int = 0) -> Tensor:
        scales = Scales(np.ones((1, 1), np.float32), 1024, columns) if columns else None
        return Tensor("w", format, (32, 32), np.zeros(1024 * format.bytes, np.uint8), role=role, scales=scales)

    def bits(tensor: Tensor, quantize: str = "", has_fp8: bool = True) -> float:
        return storage_of(tensor, StorageRules(quantize, has_fp8=has_fp8)).bits

    plain = random_tensor(np.random.default_rng(), "BF16", 32, 32).format
    for role in (Role.EXPERT_IN, Role.EXPERT_OUT):
        assert [bits(tensor(role, FP8["F8_E4M3"], columns)) for columns in (0, 32, 16)] == [8, 8, 16]
        assert bits(tensor(role, FP8["F8_E4M3"]), has_fp8=False) == 16
        assert [bits(tensor(role, plain), quantize) for quantize in ("fp8", "int4", "")] == [8, 4.5, 16]
    assert bits(tensor(Role.MLP_IN, FP8["F8_E4M3"])) == 16, "a matrix needs whole tiles of 64 columns"
