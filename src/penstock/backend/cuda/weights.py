"""Packed weights: a matrix in the layout that its products want.

Every format is a class with the methods of `Weight`, and `pack` decides which one a tensor becomes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from penstock.backend.cuda.footprint import STORED_BITS
from penstock.backend.cuda.fp8_weights import pack_float8
from penstock.backend.cuda.kernels.cublas import cublas_gemm
from penstock.backend.cuda.kernels.fp8 import quantize_fp8
from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations
from penstock.backend.cuda.kernels.gather_rows import gather_rows
from penstock.backend.cuda.kernels.gemv import gemv
from penstock.backend.cuda.kernels.hopper_gemm import hopper_gemm
from penstock.backend.cuda.kernels.silu_and_mul import act_and_mul
from penstock.backend.cuda.kernels.skinny_gemm import skinny_gemm
from penstock.backend.cuda.pack_quantized import SPLIT, QuantizedWeight, quantize_int4
from penstock.backend.cuda.pack_quantized import pack as pack_codes
from penstock.backend.cuda.quant_blocks import COLUMNS
from penstock.backend.cuda.quantized_weights import Float8, Quantized, Workspace, stack
from penstock.backend.cuda.tilings import HOPPER_GEMM_ROWS, TALL, gemv_tiling, hopper_gemm_tiling, skinny_tiling
from penstock.backend.cuda.transfer import Transfer
from penstock.backend.quantize_at_load import may_quantize
from penstock.model.dequantize import dequantize
from penstock.model.formats.int8_rows import as_q8_0
from penstock.model.tensor import Tensor, factor_of, some_rows

log = logging.getLogger(__name__)
AT_ONCE = 1 << 26  # values dequantized together
GROWN = 1.1  # times as many bits as in the file are worth a word


class Weight(Protocol):
    """A matrix [rows, width]. Products write to tensors that were made before: `x` [T, width] -> `out` [T, rows]."""

    @property
    def rows(self) -> int: ...

    @property
    def width(self) -> int: ...

    def takes_fp8(self, count: int) -> bool:
        """Whether so many rows are to come as `Fp8Activations`, from whoever makes them if that is possible."""

    def product(self, x: Any, out: Any) -> None:
        """x @ weight.T (+ bias). `out` may be wider in type than x: logits are float32."""

    def gated(self, x: Any, out: Any, scratch: Any, codes: Fp8Activations | None = None) -> None:
        """silu(left half of the product) * right half; `scratch` [T, rows] may hold the product. With `codes` there,
        instead of to `out`."""

    def gather(self, tokens: Any, out: Any) -> None:
        """out[t] = weight[tokens[t]]."""


@dataclass(slots=True)
class Dense:
    """Values of 16 bits (or 32, in tests) as they are."""

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
        if len(x) == 1:
            gemv(x, self.weight, self.bias, out, tiling=gemv_tiling(self.rows, self.width))
        elif self._uses_hopper_gemm(x) and self.rows >= TALL:
            self._hopper_gemm(x, out)
        elif tiling := skinny_tiling(len(x), self.rows, self.width, x.element_size()):
            skinny_gemm(x, self.weight, self.bias, out, tiling, self.workspace.scratch)
        else:
            cublas_gemm(x, self.weight, self.bias, out)

    def gated(self, x: Any, out: Any, scratch: Any, codes: Fp8Activations | None = None) -> None:
        if len(x) == 1:
            gemv(x, self.weight, self.bias, out, gated=True, tiling=gemv_tiling(self.rows, self.width))
        elif not codes and self._uses_hopper_gemm(x):
            self._hopper_gemm(x, out, gated=True)
        elif not codes and (tiling := skinny_tiling(len(x), self.rows, self.width, x.element_size(), gated=True)):
            skinny_gemm(x, self.weight, self.bias, out, tiling, self.workspace.scratch, gated=True)
        else:
            cublas_gemm(x, self.weight, self.bias, scratch)
            act_and_mul(scratch, out, codes)

    def _uses_hopper_gemm(self, x: Any) -> bool:
        aligned = self.width % 8 == 0 and x.element_size() == 2
        return self.workspace.has_hopper_gemm and aligned and HOPPER_GEMM_ROWS[0] <= len(x) <= HOPPER_GEMM_ROWS[1]

    def _hopper_gemm(self, x: Any, out: Any, gated: bool = False) -> None:
        tiling = hopper_gemm_tiling(len(x), out.shape[1], self.width, 2, gated)
        hopper_gemm(x, self.weight, self.bias, out, tiling, self.workspace.scratch, gated=gated)

    def gather(self, tokens: Any, out: Any) -> None:
        gather_rows(self.weight, tokens, out)


def pack(
    parts: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    device: torch.device,
    dtype: torch.dtype,
    workspace: Workspace,
    quantize: str = "",
) -> Weight:
    """Quantized formats stay as they are; plain ones become what `quantize` says: float8, 4 bits, or themselves."""
    parts = [as_q8_0(part) or part for part in parts]
    formats = {part.format.name for part in parts}
    vector = stacked_bias(parts, bias, device)
    quantize = quantize if all(may_quantize(part, quantize, "cuda") for part in parts) else ""
    if quantize and not formats <= PLAIN.keys():
        say(workspace, f"weights in {names(formats)} stay as they are: {quantize} is for plain ones")
    if dtype.itemsize == 2 and formats <= SPLIT.keys() and None not in map(factor_of, parts):
        tell_growth(parts, workspace)
        return Quantized(stack([packed(part, workspace.transfer) for part in parts]), vector, workspace)
    if dtype.itemsize == 2 and formats == {"F8_E4M3"} and (weight := pack_float8(parts, vector, device, workspace)):
        return weight
    if dtype.itemsize == 2 and not formats <= PLAIN.keys():
        size = f"{dtype.itemsize} bytes for each value"
        say(workspace, f"weights in {names(formats)} become {dtype}, {size}: no kernel reads them as they are")
    values = stacked_values(parts, device, dtype, workspace.transfer)
    if not quantize or not formats <= PLAIN.keys():
        return Dense(values, vector, workspace)
    workspace.transfer.finish()
    if quantize == "int4":
        return Quantized((quantize_int4(values),), vector, workspace)
    if values.shape[1] % COLUMNS == 0:
        return Float8(quantize_fp8(values), vector, workspace)
    say(workspace, f"weights with rows of {values.shape[1]} stay as they are: fp8 needs multiples of {COLUMNS}")
    return Dense(values, vector, workspace)


def tell_growth(parts: Sequence[Tensor], workspace: Workspace) -> None:
    for format in {part.format for part in parts}:
        stored, held = 8 * format.bytes / format.values, STORED_BITS[format.name]
        if held > GROWN * stored:
            say(workspace, f"{format.name} weights take {held:.1f} bits a value as codes of 4, {stored:.1f} in files")


def names(formats: set[str]) -> str:
    return " and ".join(sorted(formats))


def say(workspace: Workspace, message: str) -> None:
    if message not in workspace.said:
        workspace.said.add(message)
        log.warning(message)


def packed(part: Tensor, transfer: Transfer) -> QuantizedWeight:
    rows, width = part.shape
    return pack_codes(part.data, part.format.name, rows, width, transfer, factor_of(part) or 0.0)


def stacked_values(parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype, transfer: Transfer) -> Any:
    rows = sum(part.shape[0] for part in parts)
    values = torch.empty((rows, parts[0].shape[1]), dtype=dtype, device=device)
    at = 0
    for part in parts:
        copy_values(part, values[at : at + part.shape[0]], transfer)
        at += part.shape[0]
    return values


def stacked_bias(parts: Sequence[Tensor], bias: Sequence[Tensor | None], device: torch.device) -> Any | None:
    if not any(bias):
        return None
    vectors = [
        np.zeros(part.shape[0], np.float32) if tensor is None else dequantize(tensor)
        for part, tensor in zip(parts, bias, strict=True)
    ]
    return torch.from_numpy(np.concatenate(vectors)).to(device)


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def copy_values(tensor: Tensor, target: Any, transfer: Transfer) -> None:
    """The tensor's values into `target`: bytes that stay as they are, by `transfer`; others some rows at a time."""
    if PLAIN.get(tensor.format.name) == target.dtype:
        return transfer.send(tensor.data, target)
    rows, width = tensor.shape
    step = max(AT_ONCE // width, 1)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        target[first:last].copy_(values_of(some_rows(tensor, first, last)))


def values_of(tensor: Tensor) -> Any:
    """On the host, in the file's own type where torch has it."""
    kind = PLAIN.get(tensor.format.name)
    if kind is None:
        return torch.from_numpy(dequantize(tensor))
    return torch.from_numpy(tensor.data.copy()).view(kind).reshape(tensor.shape)
