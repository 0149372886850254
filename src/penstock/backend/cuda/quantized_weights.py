"""Weights that stay quantized in memory: a file's own codes, or float8 (weights.py has the protocol)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from penstock.backend.cuda import quantized_tilings as tilings
from penstock.backend.cuda.kernels import hopper_gemm, quant_gemm, quant_gemm_small, quant_gemv
from penstock.backend.cuda.kernels.cublas import cublas_gemm
from penstock.backend.cuda.kernels.dequantize import dequantize_matrix, dequantize_rows
from penstock.backend.cuda.kernels.fp8 import Fp8Weight, cublas_fp8_gemm, fp8_gemm_small, gather_fp8
from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations, fp8_view, quantize_activations
from penstock.backend.cuda.kernels.fp8_gemm import fp8_gemm
from penstock.backend.cuda.kernels.silu_and_mul import act_and_mul
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from penstock.backend.cuda.pack_quantized import QuantizedWeight
from penstock.backend.cuda.quant_blocks import ROWS
from penstock.backend.cuda.tilings import hopper_gemm_tiling


class Workspace:
    """Memory that products of many rows share, reserved while weights are packed: steps have at most `tokens` rows."""

    def __init__(self, scratch: SplitKScratch, tokens: int) -> None:
        self.scratch = scratch
        self.has_hopper_gemm = hopper_gemm.available(scratch.partials.device)
        self.said: set[str] = set()  # about weights: once for all that are alike
        self._tokens = tokens
        self._bytes = torch.empty(0, dtype=torch.uint8, device=scratch.partials.device)

    def reserve_values(self, rows: int, width: int) -> None:
        if self._tokens > tilings.QUANT_GEMM_ROWS:
            self._reserve(2 * rows * width)

    def reserve_float8(self, width: int) -> None:
        self._reserve(2 * self._tokens * width)

    def values(self, rows: int, width: int) -> Any:
        """[rows, width] of bfloat16."""
        return self._bytes[: 2 * rows * width].view(torch.bfloat16).view(rows, width)

    def float8(self, x: Any) -> Fp8Activations:
        codes = fp8_view(self.values(len(x), x.shape[1]))
        quantize_activations(x, *codes)
        return codes

    def _reserve(self, size: int) -> None:
        if size > len(self._bytes):
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._bytes.device)


@dataclass(slots=True)
class Quantized:
    """Codes of a file's format. Parts that lie below each other in different formats are multiplied one by one."""

    parts: tuple[QuantizedWeight, ...]
    bias: Any | None  # [rows] float32
    workspace: Workspace

    def __post_init__(self) -> None:
        for part in self.parts:
            self.workspace.reserve_values(part.rows, part.width)

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def width(self) -> int:
        return self.parts[0].width

    def takes_fp8(self, count: int) -> bool:
        return False

    def product(self, x: Any, out: Any) -> None:
        x = x.bfloat16()
        first = 0
        for part in self.parts:
            last = first + part.rows
            self._scaled(x, part, None if self.bias is None else self.bias[first:last], out[:, first:last])
            first = last

    def gated(self, x: Any, out: Any, scratch: Any, codes: Fp8Activations | None = None) -> None:
        part = self.parts[0]
        fits = len(self.parts) == 1 and len(x) <= tilings.SMALL_GEMM_ROWS and out.shape[1] % ROWS == 0
        if not codes and fits and part.factor == 1:
            multiply_few(x.bfloat16(), part, self.bias, out, gated=True)
        else:
            self.product(x, scratch)
            act_and_mul(scratch, out, codes)

    def gather(self, tokens: Any, out: Any) -> None:
        dequantize_rows(self.parts[0], tokens, out)
        if self.parts[0].factor != 1:
            out.mul_(self.parts[0].factor)

    def _scaled(self, x: Any, part: QuantizedWeight, bias: Any | None, out: Any) -> None:
        if part.factor == 1:
            return self._multiply(x, part, bias, out)
        self._multiply(x, part, None, out)
        out.mul_(part.factor)
        if bias is not None:
            out.add_(bias)

    def _multiply(self, x: Any, part: QuantizedWeight, bias: Any | None, out: Any) -> None:
        count, width = x.shape
        if count <= tilings.SMALL_GEMM_ROWS:
            multiply_few(x, part, bias, out)
        elif count <= tilings.QUANT_GEMM_ROWS:
            quant_gemm.quant_gemm(
                x, part, bias, out, tilings.quant_gemm_tiling(count, part.rows, width), self.workspace.scratch
            )
        else:
            values = self.workspace.values(part.rows, width)
            dequantize_matrix(part, values)
            cublas_gemm(x, values, bias, out)


def multiply_few(x: Any, part: QuantizedWeight, bias: Any | None, out: Any, gated: bool = False) -> None:
    (count, width), coding = x.shape, part.coding
    if count == 1 and coding.groups > 1:
        tiling = tilings.quant_gemv_tiling(coding.groups, part.rows, width, gated, len(coding.table) > 8)
        quant_gemv.quant_gemv(x, part, bias, out, gated=gated, tiling=tiling)
    else:
        kind = "4 bits" if coding.bits == 4 else "more bits"
        quant_gemm_small.quant_gemm_small(
            x, part, bias, out, gated=gated, tiling=tilings.small_gemm_tiling(kind, count, part.rows, width, gated)
        )


@dataclass(slots=True)
class Float8:
    """Values of 8 bits with a scale for each row; more than a few rows of activations are quantized too."""

    weight: Fp8Weight
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
        return self.workspace.has_hopper_gemm or count > tilings.SMALL_GEMM_ROWS

    def product(self, x: Any, out: Any) -> None:
        if isinstance(x, Fp8Activations):
            self._multiply(x, out)
        elif len(x) > tilings.SMALL_GEMM_ROWS:
            self._multiply(self.workspace.float8(x.bfloat16()), out)
        else:
            fp8_gemm_small(x.bfloat16(), self.weight, self.bias, out, tiling=self._small_gemm_tiling(len(x)))

    def gated(self, x: Any, out: Any, scratch: Any, codes: Fp8Activations | None = None) -> None:
        if isinstance(x, Fp8Activations) and self._uses_hopper_gemm(x):
            rows = scratch.view(-1)[: out.numel()].view(out.shape) if codes else out
            self._hopper_gemm(x, rows, gated=True)
            if codes:
                quantize_activations(rows, *codes)
        elif isinstance(x, Fp8Activations) or len(x) > tilings.SMALL_GEMM_ROWS or out.shape[1] % ROWS:
            self.product(x, scratch)
            act_and_mul(scratch, out, codes)
        else:
            fp8_gemm_small(
                x.bfloat16(),
                self.weight,
                self.bias,
                out,
                gated=True,
                tiling=self._small_gemm_tiling(len(x), gated=True),
            )

    def _multiply(self, x: Fp8Activations, out: Any) -> None:
        count = len(x.values)
        if self._uses_hopper_gemm(x):
            self._hopper_gemm(x, out)
        elif count <= tilings.FP8_GEMM_ROWS or out.dtype != torch.bfloat16:
            tiling = tilings.fp8_gemm_tiling(count, self.rows, self.width)
            fp8_gemm(*x, self.weight, self.bias, out, tiling, self.workspace.scratch)
        else:
            cublas_fp8_gemm(*x, self.weight, self.bias, out)

    def _uses_hopper_gemm(self, x: Fp8Activations) -> bool:
        return self.workspace.has_hopper_gemm and len(x.values) <= hopper_gemm.MAX_ROWS

    def _hopper_gemm(self, x: Fp8Activations, out: Any, gated: bool = False) -> None:
        weight, scratch = self.weight, self.workspace.scratch
        tiling = hopper_gemm_tiling(len(x.values), out.shape[1], self.width, 1, gated)
        hopper_gemm.hopper_gemm(
            x.values,
            weight.values,
            self.bias,
            out,
            tiling,
            scratch,
            gated=gated,
            scales=weight.scales,
            item_scales=x.scales,
        )

    def gather(self, tokens: Any, out: Any) -> None:
        gather_fp8(self.weight, tokens, out)

    def _small_gemm_tiling(self, count: int, gated: bool = False) -> quant_gemm_small.Tiling:
        return tilings.small_gemm_tiling("float8", count, self.rows, self.width, gated)


def stack(parts: Sequence[QuantizedWeight]) -> tuple[QuantizedWeight, ...]:
    """Neighbours of one format become one matrix, where their rows fill tiles."""
    return tuple(map(join, runs(parts)))


def runs(parts: Sequence[QuantizedWeight]) -> Iterator[list[QuantizedWeight]]:
    for _, group in groupby(parts, key=lambda part: (part.coding, part.factor)):
        run: list[QuantizedWeight] = []
        for part in group:
            run.append(part)
            if part.rows % ROWS:
                yield run
                run = []
        if run:
            yield run


def join(run: list[QuantizedWeight]) -> QuantizedWeight:
    if len(run) == 1:
        return run[0]
    fields = ("low", "high", "scales", "supers")
    arrays = {name: [getattr(part, name) for part in run] for name in fields}
    joined: dict[str, Any] = {name: None if some[0] is None else torch.cat(some) for name, some in arrays.items()}
    return replace(run[0], rows=sum(part.rows for part in run), **joined)
