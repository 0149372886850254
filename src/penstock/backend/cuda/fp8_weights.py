"""Holds FP8 matrices: from FP8 checkpoints, with the file's own codes and scales, or quantized at load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.backend.base import Floats
from penstock.backend.cuda.kernels import hopper_gemm, quant_gemm_small
from penstock.backend.cuda.kernels.fp8 import Fp8Weight, cublas_fp8_gemm, fp8_gemm_small, fp8_room, gather_fp8
from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations, quantize_activations
from penstock.backend.cuda.kernels.fp8_blocks import COLUMNS, Fp8BlockWeight, fp8_block_gemm, gather_fp8_blocks
from penstock.backend.cuda.kernels.fp8_gemm import fp8_gemm
from penstock.backend.cuda.kernels.hopper_low_rank import MAX_ROWS as MAX_UPDATED_ROWS
from penstock.backend.cuda.kernels.hopper_low_rank import ProductUpdates
from penstock.backend.cuda.kernels.silu_and_mul import act_and_mul
from penstock.backend.cuda.kernels.split_k import row_blocks
from penstock.backend.cuda.quantized_tilings import FP8_GEMM_ROWS, SMALL_GEMM_ROWS
from penstock.backend.cuda.quantized_weights import Workspace
from penstock.backend.cuda.storage import ROWS
from penstock.backend.cuda.transfer import Transfer
from penstock.model.tensor import Tensor


@dataclass(slots=True)
class Fp8Matrix:
    """Holds FP8 values with scales. Above a few rows, activations are quantized to FP8 too."""

    weight: Any  # what the kernels take
    bias: Any | None  # [rows] float32
    workspace: Workspace

    def __post_init__(self) -> None:
        self.workspace.reserve_activations(self.width)

    @property
    def rows(self) -> int:
        return int(self.weight.rows)

    @property
    def width(self) -> int:
        return int(self.weight.width)

    def _has_many(self, count: int) -> bool:
        return count > SMALL_GEMM_ROWS or self.workspace.tilings.fixed


@dataclass(slots=True)
class RowScaledFp8(Fp8Matrix):
    """Holds a scale for each row (weight: Fp8Weight)."""

    weight: Fp8Weight

    def takes_fp8(self, count: int) -> bool:
        return self.workspace.has_hopper_gemm or self._has_many(count)

    def product(self, x: Any, out: Any) -> None:
        if isinstance(x, Fp8Activations):
            self._multiply(x, out)
        elif self._has_many(len(x)):
            self._multiply(self.workspace.quantize(x.bfloat16()), out)
        else:
            fp8_gemm_small(x.bfloat16(), self.weight, self.bias, out, tiling=self._small_gemm_tiling(len(x)))

    def gated(self, x: Any, out: Any, scratch: Any, fp8_out: Fp8Activations | None = None) -> None:
        if isinstance(x, Fp8Activations) and self._uses_hopper_gemm(x):
            rows = scratch.view(-1)[: out.numel()].view(out.shape) if fp8_out else out
            self._hopper_gemm(x, rows, gated=True)
            if fp8_out:
                quantize_activations(rows, *fp8_out)
        elif isinstance(x, Fp8Activations) or self._has_many(len(x)) or out.shape[1] % ROWS:
            self.product(x, scratch)
            act_and_mul(scratch, out, fp8_out)
        else:
            tiling = self._small_gemm_tiling(len(x), gated=True)
            fp8_gemm_small(x.bfloat16(), self.weight, self.bias, out, gated=True, tiling=tiling)

    def updated(self, x: Any, out: Any, updates: ProductUpdates, gated: bool = False) -> bool:
        if not isinstance(x, Fp8Activations) and self._has_many(len(x)):
            x = self.workspace.quantize(x.bfloat16())
        if not isinstance(x, Fp8Activations) or not self._uses_hopper_gemm(x) or len(x.values) > MAX_UPDATED_ROWS:
            return False
        self._hopper_gemm(x, out, gated, updates)
        return True

    def gather(self, tokens: Any, out: Any) -> None:
        gather_fp8(self.weight, tokens, out)

    def _multiply(self, x: Fp8Activations, out: Any) -> None:
        count = len(x.values)
        if self._uses_hopper_gemm(x):
            self._hopper_gemm(x, out)
        elif count <= FP8_GEMM_ROWS or out.dtype != torch.bfloat16 or self.workspace.tilings.fixed:
            tiling = self.workspace.tilings.fp8_gemm(count, self.rows, self.width)
            for part in row_blocks(count, self.rows, tiling.split, tiling.rows):
                fp8_gemm(
                    x.values[part], x.scales[part], self.weight, self.bias, out[part], tiling, self.workspace.scratch
                )
        else:
            cublas_fp8_gemm(*x, self.weight, self.bias, out)

    def _uses_hopper_gemm(self, x: Fp8Activations) -> bool:
        return self.workspace.has_hopper_gemm and len(x.values) <= hopper_gemm.MAX_ROWS

    def _hopper_gemm(
        self, x: Fp8Activations, out: Any, gated: bool = False, updates: ProductUpdates | None = None
    ) -> None:
        weight, scratch = self.weight, self.workspace.scratch
        tiling = self.workspace.tilings.hopper_gemm(len(x.values), out.shape[1], self.width, 1, gated, bool(updates))
        how = {"scales": weight.scales, "item_scales": x.scales, "updates": updates}
        hopper_gemm.hopper_gemm(x.values, weight.values, self.bias, out, tiling, scratch, gated=gated, **how)

    def _small_gemm_tiling(self, count: int, gated: bool = False) -> quant_gemm_small.Tiling:
        return self.workspace.tilings.small_gemm("fp8", count, self.rows, self.width, gated)


@dataclass(slots=True)
class BlockScaledFp8(Fp8Matrix):
    """Holds a scale for every 128 columns of a row (weight: Fp8BlockWeight)."""

    weight: Fp8BlockWeight

    def takes_fp8(self, count: int) -> bool:
        return self._has_many(count)

    def product(self, x: Any, out: Any) -> None:
        scales = None
        if not isinstance(x, Fp8Activations) and self.takes_fp8(len(x)):
            x = self.workspace.quantize(x.bfloat16())
        if isinstance(x, Fp8Activations):
            x, scales = x
        x = x.bfloat16() if scales is None else x
        tiling = self.workspace.tilings.fp8_block_gemm(len(x), self.rows, self.width)
        for part in row_blocks(len(x), self.rows, tiling.split, tiling.items):
            fp8_block_gemm(
                x[part],
                None if scales is None else scales[part],
                self.weight,
                self.bias,
                out[part],
                tiling,
                self.workspace.scratch,
            )

    def gated(self, x: Any, out: Any, scratch: Any, fp8_out: Fp8Activations | None = None) -> None:
        self.product(x, scratch)
        act_and_mul(scratch, out, fp8_out)

    def updated(self, x: Any, out: Any, updates: ProductUpdates, gated: bool = False) -> bool:
        return False

    def gather(self, tokens: Any, out: Any) -> None:
        gather_fp8_blocks(self.weight, tokens, out)


def pack_fp8(parts: Sequence[Tensor], bias: Any | None, workspace: Workspace) -> RowScaledFp8 | BlockScaledFp8:
    width, found = parts[0].shape[1], scales_of(parts)
    rows = sum(part.shape[0] for part in parts)
    values = workspace.arena.empty((fp8_room(rows), width), torch.float8_e4m3fn)[:rows]
    send_codes(parts, values, workspace.transfer)
    if found.dim() == 1:
        scales = workspace.arena.empty((fp8_room(rows),), torch.float32)[:rows]
        scales.copy_(found)
        return RowScaledFp8(Fp8Weight(values, scales), bias, workspace)
    return BlockScaledFp8(Fp8BlockWeight(values, found.to(workspace.arena.device)), bias, workspace)


def scales_of(parts: Sequence[Tensor]) -> Any:
    """Returns the scales of parts in F8_E4M3 as kernels take them, on the host: [rows] or, where columns have several,
    [width / 128, rows]."""
    width = parts[0].shape[1]
    shared = [part.scales.columns for part in parts if part.scales is not None]
    if all(columns >= width for columns in shared):
        return stacked_scales(parts, width)[:, 0]
    return stacked_scales(parts, COLUMNS).T.contiguous()


def send_codes(parts: Sequence[Tensor], target: Any, transfer: Transfer) -> None:
    at = 0
    for part in parts:
        transfer.send(part.data, target[at : at + part.shape[0]])
        at += part.shape[0]


def stacked_scales(parts: Sequence[Tensor], columns: int) -> Any:
    """Returns a scale for every `columns` columns of each row of all parts: [rows, width / columns]."""
    return torch.from_numpy(np.concatenate([part_scales(part, columns) for part in parts]))


def part_scales(part: Tensor, columns: int) -> Floats:
    rows, width = part.shape
    first = np.arange(0, width, columns)
    if part.scales is None:
        return np.ones((rows, len(first)), np.float32)
    return part.scales.values[np.arange(rows)[:, None] // part.scales.rows, first // part.scales.columns]
