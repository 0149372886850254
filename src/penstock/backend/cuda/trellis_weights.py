"""Holds EXL3 matrices, with the bits of their file (weights.py has the protocol)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.backend.cuda.kernels.cublas import cublas_gemm
from penstock.backend.cuda.kernels.split_k import MAX_PARTIALS
from penstock.backend.cuda.kernels.trellis import (
    Tiling,
    TrellisWeight,
    code_book_of,
    dequantize_trellis,
    rotate_inputs,
    trellis_gemm,
)
from penstock.backend.cuda.quantized_tilings import split_of
from penstock.backend.cuda.quantized_weights import PartsMatrix, Workspace
from penstock.model.formats.trellis import Trellis

GEMM_ROWS = 64  # rows up to which a weight's values are not written out
TILE_ROWS = 64  # per program


@dataclass(slots=True)
class TrellisMatrix(PartsMatrix):
    """Holds the parts of a weight; each has its own factors for the columns."""

    parts: tuple[TrellisWeight, ...]

    def __post_init__(self) -> None:
        self.workspace.reserve_rotated(self.width, GEMM_ROWS)
        for part in self.parts:
            self.workspace.reserve_values(part.rows, part.width, GEMM_ROWS)

    def gather(self, tokens: Any, out: Any) -> None:
        raise AssertionError("trellis_of leaves out tables, of which rows are gathered")

    def _multiply(self, x: Any, part: TrellisWeight, bias: Any | None, out: Any) -> None:
        if len(x) > GEMM_ROWS and not self.workspace.tilings.fixed:
            values = self.workspace.values(part.rows, part.width)
            dequantize_trellis(part, values)
            return cublas_gemm(x.bfloat16(), values, bias, out)
        step = min(MAX_PARTIALS // part.rows, GEMM_ROWS)
        for first in range(0, len(x), step):
            self._multiply_few(x[first : first + step], part, bias, out[first : first + step])

    def _multiply_few(self, x: Any, part: TrellisWeight, bias: Any | None, out: Any) -> None:
        rows = self.workspace.values(len(x), part.width).view(torch.float16)
        rotate_inputs(x, part, rows)
        trellis_gemm(rows, part, bias, out, self._tiling(len(x), part), self.workspace.scratch)

    def _tiling(self, count: int, part: TrellisWeight) -> Tiling:
        count = GEMM_ROWS if self.workspace.tilings.fixed else count
        items = 16 if count <= 16 else 32 if count <= 32 else 64
        programs = 2 * self.workspace.tilings.device.sm_count
        return Tiling(items, TILE_ROWS, split_of(count, part.rows, part.width, TILE_ROWS, items, programs), 4)


def pack_trellis(parts: Sequence[Trellis], bias: Any | None, workspace: Workspace) -> TrellisMatrix:
    return TrellisMatrix(tuple(packed(part, workspace) for part in parts), bias, workspace)


def packed(part: Trellis, workspace: Workspace) -> TrellisWeight:
    down, across, words = part.tiles.shape
    arena = workspace.arena
    tiles = arena.empty((down, across, words // 2), torch.int32)
    workspace.transfer.send(np.ascontiguousarray(part.tiles).reshape(-1).view(np.uint8), tiles)
    svh, suh = (arena.empty((len(vector),), torch.float32) for vector in (part.svh, part.suh))
    svh.copy_(torch.from_numpy(part.svh))
    suh.copy_(torch.from_numpy(part.suh))
    return TrellisWeight(code_book_of(part.code_book, part.bits), tiles, svh, suh)
