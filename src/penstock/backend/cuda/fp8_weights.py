"""Weights of FP8 checkpoints: a file's own codes and scales (weights.py has the protocol)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from penstock.backend.base import Floats
from penstock.backend.cuda import quantized_tilings as tilings
from penstock.backend.cuda.kernels.fp8 import empty_fp8
from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations
from penstock.backend.cuda.kernels.fp8_blocks import (
    COLUMNS,
    Fp8BlockWeight,
    Tiling,
    fp8_block_gemm,
    gather_fp8_blocks,
)
from penstock.backend.cuda.kernels.silu_and_mul import act_and_mul
from penstock.backend.cuda.quant_blocks import COLUMNS as TILE
from penstock.backend.cuda.quantized_weights import Float8, Workspace
from penstock.backend.cuda.transfer import transfer
from penstock.model.tensor import Tensor


@dataclass(slots=True)
class BlockFloat8:
    """Values of 8 bits with a scale for every 128 columns of a row."""

    weight: Fp8BlockWeight
    bias: Any | None  # [rows] float32
    workspace: Workspace

    def __post_init__(self) -> None:
        self.workspace.reserve_float8(self.width)

    @property
    def rows(self) -> int:
        return self.weight.rows

    @property
    def width(self) -> int:
        return self.weight.width

    def takes_fp8(self, count: int) -> bool:
        return count > tilings.SMALL_GEMM_ROWS

    def product(self, x: Any, out: Any) -> None:
        scales = None
        if not isinstance(x, Fp8Activations) and self.takes_fp8(len(x)):
            x = self.workspace.float8(x.bfloat16())
        if isinstance(x, Fp8Activations):
            x, scales = x
        tiling = block_tiling(len(x), self.rows, self.width)
        fp8_block_gemm(
            x.bfloat16() if scales is None else x, scales, self.weight, self.bias, out, tiling, self.workspace.scratch
        )

    def gated(self, x: Any, out: Any, scratch: Any, codes: Fp8Activations | None = None) -> None:
        self.product(x, scratch)
        act_and_mul(scratch, out, codes)

    def gather(self, tokens: Any, out: Any) -> None:
        gather_fp8_blocks(self.weight, tokens, out)


@lru_cache(maxsize=4096)
def block_tiling(count: int, rows: int, width: int) -> Tiling:
    """Not tuned yet; as the kernels beside it are."""
    items = 16 if count <= 16 else tilings.block_of(count)
    tall = 128 if count > 128 else 64
    split = tilings.split_of(count, rows, width, tall, items, tilings.PROGRAMS_FLOAT8)
    return Tiling(tall, items, split, 8 if tall == 128 else 4, 4)


def pack_float8(
    parts: Sequence[Tensor], bias: Any | None, device: torch.device, workspace: Workspace
) -> Float8 | BlockFloat8 | None:
    """One weight of parts in F8_E4M3; None where no kernel takes their shape."""
    width = parts[0].shape[1]
    shared = [part.scales.columns for part in parts if part.scales is not None]
    if width % TILE or any(columns < width and columns % COLUMNS for columns in shared):
        return None
    weight = empty_fp8(sum(part.shape[0] for part in parts), width, device)
    carry_codes(parts, weight.values)
    if all(columns >= width for columns in shared):
        weight.scales.copy_(stacked_scales(parts, width)[:, 0])
        return Float8(weight, bias, workspace)
    scales = stacked_scales(parts, COLUMNS).T.contiguous().to(device)
    return BlockFloat8(Fp8BlockWeight(weight.values, scales), bias, workspace)


def carry_codes(parts: Sequence[Tensor], target: Any) -> None:
    at = 0
    for part in parts:
        transfer.carry(part.data, target[at : at + part.shape[0]])
        at += part.shape[0]


def stacked_scales(parts: Sequence[Tensor], columns: int) -> Any:
    """One for each row and so many columns: [rows, width / columns]."""
    return torch.from_numpy(np.concatenate([part_scales(part, columns) for part in parts]))


def part_scales(part: Tensor, columns: int) -> Floats:
    rows, width = part.shape
    first = np.arange(0, width, columns)
    if part.scales is None:
        return np.ones((rows, len(first)), np.float32)
    return part.scales.values[np.arange(rows)[:, None] // part.scales.rows, first // part.scales.columns]
