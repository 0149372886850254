"""Packs matrices in the layout that their kernels read.

Every kind of matrix is a class with the methods of `Weight`; `pack` decides which one some tensors become.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from penstock.backend.cuda.device import DEVICE
from penstock.backend.cuda.fp8_weights import RowScaledFp8, pack_fp8
from penstock.backend.cuda.kernels.cublas import cublas_gemm
from penstock.backend.cuda.kernels.fixed_gemm import fixed_gemm
from penstock.backend.cuda.kernels.fp8 import quantize_fp8
from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations
from penstock.backend.cuda.kernels.gather_rows import gather_rows
from penstock.backend.cuda.kernels.gemv import gemv
from penstock.backend.cuda.kernels.hopper_gemm import hopper_gemm
from penstock.backend.cuda.kernels.hopper_low_rank import MAX_ROWS as MAX_UPDATED_ROWS
from penstock.backend.cuda.kernels.hopper_low_rank import ProductUpdates
from penstock.backend.cuda.kernels.silu_and_mul import act_and_mul
from penstock.backend.cuda.kernels.skinny_gemm import skinny_gemm
from penstock.backend.cuda.kernels.split_k import row_blocks
from penstock.backend.cuda.pack_quantized import QuantizedWeight, quantize_int4
from penstock.backend.cuda.pack_quantized import pack as pack_codes
from penstock.backend.cuda.quantized_weights import QuantizedMatrix, Workspace, stack
from penstock.backend.cuda.storage import CODE_BITS, COLUMNS, StorageRules, WeightLayout, common_layout
from penstock.backend.cuda.tilings import HOPPER_GEMM_ROWS, TALL
from penstock.backend.cuda.transfer import Transfer
from penstock.backend.cuda.trellis_weights import pack_trellis
from penstock.backend.quantize_at_load import may_quantize
from penstock.model.dequantize import dequantize
from penstock.model.formats.near_blocks import as_near_blocks
from penstock.model.formats.trellis import trellis_of
from penstock.model.tensor import Tensor, factor_of, some_rows

log = logging.getLogger(__name__)
CHUNK_VALUES = 1 << 26  # dequantized together
NOTED_GROWTH = 1.1  # ratio to the bits in the file above which growth is logged


class Weight(Protocol):
    """Is a matrix [rows, width]. Products write to tensors that exist already: `x` [T, width] -> `out` [T, rows]."""

    @property
    def rows(self) -> int: ...

    @property
    def width(self) -> int: ...

    def takes_fp8(self, count: int) -> bool:
        """Returns whether, for `count` rows, activations should arrive already quantized to FP8."""

    def product(self, x: Any, out: Any) -> None:
        """Computes x @ weight.T (+ bias). `out` may have a wider type than x: logits are float32."""

    def gated(self, x: Any, out: Any, scratch: Any, fp8_out: Fp8Activations | None = None) -> None:
        """Computes silu(left half of the product) * right half. `scratch` [T, rows] may hold the product. With
        `fp8_out`, the result is quantized into it instead of being written to `out`."""

    def updated(self, x: Any, out: Any, updates: ProductUpdates, gated: bool = False) -> bool:
        """Computes a product, or a gated one, with the updates of adapters. Returns False, and does nothing,
        if the kernel for this number of rows does not add them."""

    def gather(self, tokens: Any, out: Any) -> None:
        """Sets out[t] to row tokens[t] of the matrix."""


@dataclass(slots=True)
class DenseMatrix:
    """Holds plain values of 16 bits (or 32, in tests)."""

    weight: Any  # [rows, width]
    bias: Any | None  # [rows] float32
    workspace: Workspace

    @property
    def rows(self) -> int:
        return int(self.weight.shape[0])

    @property
    def width(self) -> int:
        return int(self.weight.shape[1])

    def takes_fp8(self, count: int) -> bool:
        return False

    def product(self, x: Any, out: Any) -> None:
        if self.workspace.tilings.fixed:
            self._fixed_gemm(x, out)
        elif len(x) == 1:
            gemv(x, self.weight, self.bias, out, tiling=self.workspace.tilings.gemv(self.rows, self.width))
        elif self._uses_hopper_gemm(x) and self.rows >= TALL:
            self._hopper_gemm(x, out)
        elif tiling := self.workspace.tilings.skinny(len(x), self.rows, self.width, x.element_size()):
            skinny_gemm(x, self.weight, self.bias, out, tiling, self.workspace.scratch)
        else:
            cublas_gemm(x, self.weight, self.bias, out)

    def gated(self, x: Any, out: Any, scratch: Any, fp8_out: Fp8Activations | None = None) -> None:
        if self.workspace.tilings.fixed:
            self._fixed_gemm(x, scratch)
            act_and_mul(scratch, out, fp8_out)
        elif len(x) == 1:
            gemv(x, self.weight, self.bias, out, gated=True, tiling=self.workspace.tilings.gemv(self.rows, self.width))
        elif not fp8_out and self._uses_hopper_gemm(x):
            self._hopper_gemm(x, out, gated=True)
        elif not fp8_out and (
            tiling := self.workspace.tilings.skinny(len(x), self.rows, self.width, x.element_size(), gated=True)
        ):
            skinny_gemm(x, self.weight, self.bias, out, tiling, self.workspace.scratch, gated=True)
        else:
            cublas_gemm(x, self.weight, self.bias, scratch)
            act_and_mul(scratch, out, fp8_out)

    def updated(self, x: Any, out: Any, updates: ProductUpdates, gated: bool = False) -> bool:
        if len(x) > MAX_UPDATED_ROWS or not self._may_use_hopper_gemm(x):
            return False
        self._hopper_gemm(x, out, gated, updates)
        return True

    def _uses_hopper_gemm(self, x: Any) -> bool:
        return self._may_use_hopper_gemm(x) and HOPPER_GEMM_ROWS[0] <= len(x) <= HOPPER_GEMM_ROWS[1]

    def _may_use_hopper_gemm(self, x: Any) -> bool:
        return self.workspace.has_hopper_gemm and self.width % 8 == 0 and x.element_size() == 2

    def _hopper_gemm(self, x: Any, out: Any, gated: bool = False, updates: ProductUpdates | None = None) -> None:
        tiling = self.workspace.tilings.hopper_gemm(len(x), out.shape[1], self.width, 2, gated, bool(updates))
        hopper_gemm(x, self.weight, self.bias, out, tiling, self.workspace.scratch, gated=gated, updates=updates)

    def _fixed_gemm(self, x: Any, out: Any) -> None:
        tiling = self.workspace.tilings.fixed_gemm(self.rows, self.width, x.element_size())
        for part in row_blocks(len(x), self.rows, tiling.split, tiling.items):
            fixed_gemm(x[part], self.weight, self.bias, out[part], tiling, self.workspace.scratch)

    def gather(self, tokens: Any, out: Any) -> None:
        gather_rows(self.weight, tokens, out)


class PackTarget(NamedTuple):
    """Says where weights are packed, and what plain ones become."""

    workspace: Workspace
    dtype: torch.dtype  # type of activations
    quantize: str = ""

    @property
    def rules(self) -> StorageRules:
        return StorageRules(self.quantize, self.dtype.itemsize, self.workspace.tilings.device.has_fp8)


def pack(parts: Sequence[Tensor], bias: Sequence[Tensor | None], target: PackTarget) -> Weight:
    workspace, layout = target.workspace, common_layout(parts, target.rules, experts=False)
    parts = [as_near_blocks(part) or part for part in parts]
    vector = stacked_bias(parts, bias, workspace.arena.device)
    log_storage(parts, layout, target)
    match layout:
        case WeightLayout.CODES:
            log_growth(parts, workspace)
            return QuantizedMatrix(stack([packed(part, workspace.transfer) for part in parts]), vector, workspace)
        case WeightLayout.TRELLIS:
            return pack_trellis([trellis for part in parts if (trellis := trellis_of(part))], vector, workspace)
        case WeightLayout.FP8:
            return pack_fp8(parts, vector, workspace)
        case WeightLayout.INT4:
            return QuantizedMatrix((quantize_int4(values_to_quantize(parts, target)),), vector, workspace)
        case WeightLayout.ROW_FP8:
            return RowScaledFp8(quantize_fp8(values_to_quantize(parts, target)), vector, workspace)
    return DenseMatrix(stacked_values(parts, target.dtype, workspace), vector, workspace)


def values_to_quantize(parts: Sequence[Tensor], target: PackTarget) -> Any:
    values = stacked_values(parts, target.dtype, target.workspace, kept=False)
    target.workspace.transfer.finish()
    return values


def log_storage(parts: Sequence[Tensor], layout: WeightLayout, target: PackTarget) -> None:
    formats, workspace = {part.format.name for part in parts}, target.workspace
    quantize = target.quantize if all(may_quantize(part, DEVICE) for part in parts) else ""
    if quantize and not formats <= PLAIN.keys():
        log_once(workspace, f"weights in {names(formats)} stay as they are: {quantize} is for plain ones")
    if layout is WeightLayout.VALUES and target.dtype.itemsize == 2 and not formats <= PLAIN.keys():
        size = f"{target.dtype.itemsize} bytes for each value"
        log_once(
            workspace, f"weights in {names(formats)} become {target.dtype}, {size}: no kernel reads them as they are"
        )
    if layout is WeightLayout.VALUES and quantize and formats <= PLAIN.keys():
        width = parts[0].shape[1]
        log_once(workspace, f"weights with rows of {width} stay as they are: fp8 needs multiples of {COLUMNS}")


def log_growth(parts: Sequence[Tensor], workspace: Workspace) -> None:
    for format in {part.format for part in parts}:
        in_file, packed_bits = 8 * format.bytes / format.values, CODE_BITS[format.name]
        if packed_bits > NOTED_GROWTH * in_file:
            log_once(
                workspace,
                f"{format.name} weights take {packed_bits:.1f} bits a value in memory, {in_file:.1f} in the file",
            )


def names(formats: set[str]) -> str:
    return " and ".join(sorted(formats))


def log_once(workspace: Workspace, message: str) -> None:
    if message not in workspace.logged:
        workspace.logged.add(message)
        log.warning(message)


def packed(part: Tensor, transfer: Transfer) -> QuantizedWeight:
    rows, width = part.shape
    return pack_codes(part.data, part.format.name, rows, width, transfer, factor_of(part) or 0.0)


def stacked_values(parts: Sequence[Tensor], dtype: torch.dtype, workspace: Workspace, kept: bool = True) -> Any:
    """Returns the values of all parts on the device, one below the other: in the arena if they are kept as they are."""
    shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
    arena, transfer = workspace.arena, workspace.transfer
    values = arena.empty(shape, dtype) if kept else torch.empty(shape, dtype=dtype, device=arena.device)
    at = 0
    for part in parts:
        copy_values(part, values[at : at + part.shape[0]], transfer)
        at += part.shape[0]
    return values


def stacked_bias(parts: Sequence[Tensor], bias: Sequence[Tensor | None], device: torch.device) -> Any | None:
    """Returns the biases of all parts on the device, with zeros for parts that have none; None if none has one."""
    if not any(bias):
        return None
    vectors = [
        np.zeros(part.shape[0], np.float32) if tensor is None else dequantize(tensor)
        for part, tensor in zip(parts, bias, strict=True)
    ]
    return torch.from_numpy(np.concatenate(vectors)).to(device)


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def copy_values(tensor: Tensor, target: Any, transfer: Transfer) -> None:
    if PLAIN.get(tensor.format.name) == target.dtype:
        return transfer.send(tensor.data, target)
    rows, width = tensor.shape
    step = max(CHUNK_VALUES // width, 1)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        target[first:last].copy_(values_of(some_rows(tensor, first, last)))


def values_of(tensor: Tensor) -> Any:
    """Returns the tensor's values on the host, in the file's own type if torch has it."""
    kind = PLAIN.get(tensor.format.name)
    if kind is None:
        return torch.from_numpy(dequantize(tensor))
    return torch.from_numpy(tensor.data.copy()).view(kind).reshape(tensor.shape)
