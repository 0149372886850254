"""Holds the matrices of all experts of a layer, one below the other, and computes the moe op with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import triton

from penstock.backend.cuda.activations import ACTIVATIONS
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.fp8_weights import scales_of, send_codes
from penstock.backend.cuda.kernels.expert_gemm import (
    ExpertRows,
    expert_gemm,
    expert_gemv,
    quant_expert_gemm,
    quant_expert_gemv,
)
from penstock.backend.cuda.kernels.expert_routing import (
    SMALLEST_BLOCK,
    ExpertPermutation,
    combine_experts,
    permute_pairs,
    route,
)
from penstock.backend.cuda.kernels.fp8 import quantize_fp8
from penstock.backend.cuda.kernels.silu_and_mul import act_and_mul
from penstock.backend.cuda.pack_quantized import QuantizedWeight, quantize_int4
from penstock.backend.cuda.quantized_weights import Workspace, join
from penstock.backend.cuda.storage import WeightLayout, common_layout
from penstock.backend.cuda.weights import (
    PLAIN,
    PackTarget,
    log_growth,
    log_once,
    names,
    packed,
    stacked_bias,
    stacked_values,
    values_to_quantize,
)
from penstock.model.formats.near_blocks import as_near_blocks
from penstock.model.ops import ExpertWeights
from penstock.model.spec import ExpertSpec
from penstock.model.tensor import Stack, Tensor

LARGEST_BLOCK = 128  # token-expert pairs
FIXED_BLOCK = 64  # the same, where results may not depend on how many pairs there are


class ExpertMatrices(Protocol):
    """Holds a matrix for each expert. For each token-expert pair, `out` [pairs, rows of one matrix] gets a row of x
    times the matrix of the pair's expert (+ bias)."""

    def by_pairs(self, rows: ExpertRows, out: Any, gated: bool = False) -> None: ...

    def by_blocks(self, rows: ExpertRows, permutation: ExpertPermutation, size: int, out: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """Holds plain values."""

    weight: Any  # [experts * rows, width]
    bias: Any | None  # [experts * rows] float32
    tilings: Tilings

    def by_pairs(self, rows: ExpertRows, out: Any, gated: bool = False) -> None:
        tiling = self.tilings.expert_gemv(self.weight.element_size(), out.shape[1], self.weight.shape[1], gated)
        expert_gemv(rows, self.weight, self.bias, out, gated, tiling=tiling)

    def by_blocks(self, rows: ExpertRows, permutation: ExpertPermutation, size: int, out: Any) -> None:
        expert_gemm(rows, permutation, size, self.weight, self.bias, out, self.tilings.device)


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    """Holds FP8 values with scales. Activations stay as they are."""

    weight: Any  # [experts * rows, width] float8_e4m3fn
    scales: Any  # [experts * rows] or [width / 128, experts * rows] float32
    bias: Any | None  # [experts * rows] float32
    tilings: Tilings

    def by_pairs(self, rows: ExpertRows, out: Any, gated: bool = False) -> None:
        tiling = self.tilings.expert_gemv(1, out.shape[1], self.weight.shape[1], gated)
        expert_gemv(rows, self.weight, self.bias, out, gated, self.scales, tiling=tiling)

    def by_blocks(self, rows: ExpertRows, permutation: ExpertPermutation, size: int, out: Any) -> None:
        expert_gemm(rows, permutation, size, self.weight, self.bias, out, self.tilings.device, self.scales)


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """Holds matrices that stay quantized."""

    weight: QuantizedWeight
    bias: Any | None  # [experts * rows] float32
    factors: Any | None = None  # [experts * rows] float32, if matrices have factors

    def by_pairs(self, rows: ExpertRows, out: Any, gated: bool = False) -> None:
        quant_expert_gemv(rows._replace(x=rows.x.bfloat16()), self.weight, self.bias, out, gated, self.factors)

    def by_blocks(self, rows: ExpertRows, permutation: ExpertPermutation, size: int, out: Any) -> None:
        rows = rows._replace(x=rows.x.bfloat16())
        quant_expert_gemm(rows, permutation, size, self.weight, self.bias, out, self.factors)


def compute_experts(
    x: Any,
    router_logits: Any,
    out: Any,
    selected: Any,
    weights: Any,
    both: Any,
    hidden: Any,
    given: Any,
    *,
    experts: ExpertWeights,
    spec: ExpertSpec,
    permutation: ExpertPermutation,
    fixed: bool = False,
) -> None:
    """Computes the moe op. With fewer token-expert pairs than half of the experts, each pair reads its matrices by
    itself; otherwise, and always where blocks are `fixed`, the pairs of an expert are computed together."""
    up, down, choice_bias, expert_scale = experts
    selected = selected.view(torch.int32)
    pairs = selected.numel()
    both, hidden, given = (rows.view(pairs, rows.numel() // pairs) for rows in (both, hidden, given))
    route(router_logits, choice_bias, spec, selected, weights, expert_scale)
    rows = ExpertRows(x, selected, spec.top_k)
    if spec.weigh_inputs:
        rows = weighted_rows(x, selected, weights, given)
    if pairs <= max(spec.count // 2, spec.top_k) and not fixed:
        fused = spec.gated and spec.act == "silu"
        up.by_pairs(rows, hidden if fused else both, fused)
        if not fused:
            activate(both, hidden, spec)
        down.by_pairs(ExpertRows(hidden, selected, 1), given)
    else:
        usual = min(max(triton.next_power_of_2(pairs // spec.count), SMALLEST_BLOCK), LARGEST_BLOCK)
        size = FIXED_BLOCK if fixed else usual
        permute_pairs(selected, permutation, size)
        up.by_blocks(rows, permutation, size, both)
        activate(both, hidden, spec)
        down.by_blocks(ExpertRows(hidden, selected, 1), permutation, size, given)
    combine_experts(given, weights, out)


def weighted_rows(x: Any, selected: Any, weights: Any, scratch: Any) -> ExpertRows:
    """Returns each token once for each of its experts, multiplied by the expert's weight, which becomes 1. The rows are
    in `scratch` until the experts' outputs are written there."""
    torch.mul(x[:, None, :], weights[:, :, None], out=scratch.view(*weights.shape, x.shape[1]))
    weights.fill_(1)
    return ExpertRows(scratch, selected, 1)


def activate(both: Any, hidden: Any, spec: ExpertSpec) -> None:
    if spec.gated:
        act_and_mul(both, hidden, act=spec.act)
    else:
        ACTIVATIONS[spec.act](both, out=hidden)


def pack_matrices(stacks: Sequence[Stack], target: PackTarget) -> ExpertMatrices:
    parts, workspace = [part for stack in stacks for part in stack.parts], target.workspace
    layout = common_layout(parts, target.rules, experts=True)
    parts = [as_near_blocks(part) or part for part in parts]
    bias = stacked_bias(parts, [one for stack in stacks for one in stack.bias], workspace.arena.device)
    match layout:
        case WeightLayout.CODES:
            log_growth(parts[:1], workspace)
            return pack_quantized_experts(parts, bias, workspace)
        case WeightLayout.FP8:
            return pack_fp8_experts(parts, bias, workspace)
        case WeightLayout.INT4:
            return QuantizedExperts(quantize_int4(values_to_quantize(parts, target)), bias)
        case WeightLayout.ROW_FP8:
            made = quantize_fp8(values_to_quantize(parts, target))
            return Fp8Experts(made.values, made.scales, bias, workspace.tilings)
    log_values(parts, target)
    return DenseExperts(stacked_values(parts, target.dtype, workspace), bias, workspace.tilings)


def log_values(parts: Sequence[Tensor], target: PackTarget) -> None:
    """Logs that experts become values, where that takes more memory than it might."""
    formats = names({part.format.name for part in parts})
    if target.dtype.itemsize == 2 and not all(part.format.name in PLAIN for part in parts):
        stored = sum(part.size for part in parts) / sum(part.shape[0] * part.shape[1] for part in parts)
        log_once(
            target.workspace,
            f"experts in {formats} become {target.dtype}, {2 / stored:.1f} times as large: no kernel reads them",
        )
    if target.quantize:
        log_once(target.workspace, f"experts in {formats} do not become {target.quantize}: they stay as they are")


def pack_quantized_experts(parts: Sequence[Tensor], bias: Any | None, workspace: Workspace) -> QuantizedExperts:
    matrices = [packed(part, workspace.transfer) for part in parts]
    factors = None
    if any(part.scales is not None for part in parts):
        each = torch.tensor([matrix.factor for matrix in matrices], dtype=torch.float32)
        sizes = torch.tensor([matrix.rows for matrix in matrices])
        factors = each.repeat_interleave(sizes).to(workspace.arena.device)
    return QuantizedExperts(join([replace(matrix, factor=1.0) for matrix in matrices]), bias, factors)


def pack_fp8_experts(parts: Sequence[Tensor], bias: Any | None, workspace: Workspace) -> Fp8Experts:
    scales, rows = scales_of(parts), sum(part.shape[0] for part in parts)
    values = workspace.arena.empty((rows, parts[0].shape[1]), torch.float8_e4m3fn)
    send_codes(parts, values, workspace.transfer)
    return Fp8Experts(values, scales.to(workspace.arena.device), bias, workspace.tilings)
