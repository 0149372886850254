"""Holds matrices that stay quantized in memory, with the codes of a file's format (weights.py has the protocol)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import frexp
from typing import Any

import torch

from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.kernels import quant_gemm, quant_gemm_small, quant_gemv
from penstock.backend.cuda.kernels.cublas import cublas_gemm
from penstock.backend.cuda.kernels.dequantize import dequantize_matrix, dequantize_rows
from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations, fp8_view, quantize_activations
from penstock.backend.cuda.kernels.hopper_low_rank import ProductUpdates
from penstock.backend.cuda.kernels.silu_and_mul import act_and_mul
from penstock.backend.cuda.kernels.split_k import SplitKScratch, row_blocks
from penstock.backend.cuda.pack_quantized import QuantizedWeight
from penstock.backend.cuda.quantized_tilings import QUANT_GEMM_ROWS, SMALL_GEMM_ROWS
from penstock.backend.cuda.storage import ROWS
from penstock.backend.cuda.transfer import Transfer


class Workspace:
    """Holds memory that products of many rows share. It is reserved while weights are packed, for steps of at most
    `tokens` rows."""

    def __init__(self, scratch: SplitKScratch, tokens: int, tilings: Tilings, arena: Arena | None = None) -> None:
        self.scratch = scratch
        self.arena = arena or Arena(scratch.partials.device)  # where weights are
        self.tilings = tilings
        self.transfer = Transfer(scratch.partials.device)  # carries weights to the device
        self.has_hopper_gemm = tilings.device.has_hopper_gemm and not tilings.fixed
        self.logged: set[str] = set()  # messages about weights: each is logged once
        self._tokens = tokens
        self._bytes = torch.empty(0, dtype=torch.uint8, device=scratch.partials.device)

    def reserve_values(self, rows: int, width: int, unless: int) -> None:
        """Reserves room for a matrix in bfloat16, if steps are longer than `unless` and tilings are not fixed."""
        if self._tokens > unless and not self.tilings.fixed:
            self._reserve(2 * rows * width)

    def reserve_activations(self, width: int) -> None:
        self._reserve(2 * self._tokens * width)

    def reserve_rotated(self, width: int, most: int) -> None:
        self._reserve(2 * min(self._tokens, most) * width)

    def values(self, rows: int, width: int) -> Any:
        return self._bytes[: 2 * rows * width].view(torch.bfloat16).view(rows, width)

    def quantize(self, x: Any) -> Fp8Activations:
        quantized = fp8_view(self.values(len(x), x.shape[1]))
        quantize_activations(x, *quantized)
        return quantized

    def _reserve(self, size: int) -> None:
        if size > len(self._bytes):
            self._bytes = self.arena.empty((size,), torch.uint8, kept=False)


def each_part(parts: Sequence[Any], bias: Any | None, out: Any) -> Iterator[tuple[Any, Any | None, Any]]:
    """Yields the parts of a weight that lie below each other, each with its part of the bias and its columns of out."""
    first = 0
    for part in parts:
        last = first + part.rows
        yield part, None if bias is None else bias[first:last], out[:, first:last]
        first = last


@dataclass(slots=True)
class PartsMatrix:
    """Holds parts that lie below each other and are multiplied one by one: each has a format or factors of its own."""

    parts: tuple[Any, ...]
    bias: Any | None  # [rows] float32
    workspace: Workspace

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def width(self) -> int:
        return int(self.parts[0].width)

    def takes_fp8(self, count: int) -> bool:
        return False

    def product(self, x: Any, out: Any) -> None:
        for part, bias, columns in each_part(self.parts, self.bias, out):
            self._multiply(x, part, bias, columns)

    def gated(self, x: Any, out: Any, scratch: Any, fp8_out: Fp8Activations | None = None) -> None:
        self.product(x, scratch)
        act_and_mul(scratch, out, fp8_out)

    def updated(self, x: Any, out: Any, updates: ProductUpdates, gated: bool = False) -> bool:
        return False

    def _multiply(self, x: Any, part: Any, bias: Any | None, out: Any) -> None:
        raise NotImplementedError


@dataclass(slots=True)
class QuantizedMatrix(PartsMatrix):
    """Holds codes of a file's format."""

    parts: tuple[QuantizedWeight, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            self.workspace.reserve_values(part.rows, part.width, QUANT_GEMM_ROWS)

    def gated(self, x: Any, out: Any, scratch: Any, fp8_out: Fp8Activations | None = None) -> None:
        part = self.parts[0]
        fits = len(self.parts) == 1 and len(x) <= SMALL_GEMM_ROWS and out.shape[1] % ROWS == 0
        if not fp8_out and fits and not self.workspace.tilings.fixed:
            quant_gemm_few_rows(x.bfloat16(), part, self.bias, out, self.workspace.tilings, gated=True)
        else:
            PartsMatrix.gated(self, x, out, scratch, fp8_out)

    def gather(self, tokens: Any, out: Any) -> None:
        dequantize_rows(self.parts[0], tokens, out)

    def _multiply(self, x: Any, part: QuantizedWeight, bias: Any | None, out: Any) -> None:
        x = x.bfloat16()
        count, width = x.shape
        if self.workspace.tilings.fixed:
            self._fixed_gemm(x, part, bias, out)
        elif count <= SMALL_GEMM_ROWS:
            quant_gemm_few_rows(x, part, bias, out, self.workspace.tilings)
        elif count <= QUANT_GEMM_ROWS:
            tiling = self.workspace.tilings.quant_gemm(count, part.rows, width)
            quant_gemm.quant_gemm(x, part, bias, out, tiling, self.workspace.scratch)
        else:
            self._expanded_gemm(x, part, bias, out)

    def _expanded_gemm(self, x: Any, part: QuantizedWeight, bias: Any | None, out: Any) -> None:
        """Expands a part to bfloat16, which holds its values times a power of two exactly, and multiplies with that."""
        power = 2.0 ** (frexp(part.factor)[1] - 1)
        rest = part.factor / power
        values = self.workspace.values(part.rows, part.width)
        dequantize_matrix(replace(part, factor=power), values)
        cublas_gemm(x, values, bias if rest == 1 else None, out)
        if rest != 1:
            out.mul_(rest)
            if bias is not None:
                out.add_(bias)

    def _fixed_gemm(self, x: Any, part: QuantizedWeight, bias: Any | None, out: Any) -> None:
        tiling = self.workspace.tilings.quant_gemm(len(x), part.rows, part.width)
        for some in row_blocks(len(x), part.rows, tiling.split, tiling.rows):
            quant_gemm.quant_gemm(x[some], part, bias, out[some], tiling, self.workspace.scratch)


def quant_gemm_few_rows(
    x: Any, part: QuantizedWeight, bias: Any | None, out: Any, tilings: Tilings, gated: bool = False
) -> None:
    (count, width), coding = x.shape, part.coding
    if count == 1 and coding.groups > 1:
        tiling = tilings.quant_gemv(coding.groups, part.rows, width, gated, len(coding.table) > 8)
        quant_gemv.quant_gemv(x, part, bias, out, gated=gated, tiling=tiling)
    else:
        kind = "4 bits" if coding.bits == 4 else "more bits"
        small = tilings.small_gemm(kind, count, part.rows, width, gated)
        quant_gemm_small.quant_gemm_small(x, part, bias, out, gated=gated, tiling=small)


def stack(parts: Sequence[QuantizedWeight]) -> tuple[QuantizedWeight, ...]:
    """Joins neighbours of one format into one matrix, if their rows fill tiles."""
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
