"""Packs weights for a GPU: on it as a model is loaded, and in host memory for weights that replace loaded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from penstock.backend.base import StoredAs
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.experts import pack_matrices
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from penstock.backend.cuda.quantized_weights import Workspace
from penstock.backend.cuda.storage import storage_of
from penstock.backend.cuda.weights import PackTarget, Weight, pack, stacked_values
from penstock.model.dequantize import dequantize
from penstock.model.ops import ExpertWeights
from penstock.model.tensor import Stack, Tensor

Reserving = Callable[[str], AbstractContextManager[None]]


class CudaPacker:
    """Implements WeightPacker. `reserving` is entered where memory for a weight is taken."""

    def __init__(self, target: PackTarget, reserving: Reserving = lambda what: nullcontext()) -> None:
        self.target = target
        self._reserving = reserving

    @classmethod
    def on_host(cls, target: PackTarget) -> CudaPacker:
        """Returns a packer with the same formats in host memory. It calls no driver, so it may run in another thread
        while a graph is captured."""
        return cls(target._replace(workspace=host_workspace(target.workspace.tilings)))

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Weight:
        with self._reserving(f"the weight {parts[0].name}"):
            return pack(parts, bias, self.target)

    def pack_vector(self, tensor: Tensor) -> Any:
        return torch.from_numpy(dequantize(tensor).copy()).to(self.target.workspace.arena.device)

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> ExpertWeights:
        with self._reserving(f"the experts of {up[0].parts[0].name}"):
            bias = None if choice_bias is None else self.pack_vector(choice_bias)
            return ExpertWeights(pack_matrices(up, self.target), pack_matrices(down, self.target), bias)

    def pack_heads(self, tensor: Tensor) -> Any:
        """Packs the per-head matrices of MLA as values: they are a small part of a model."""
        heads, rows, width = tensor.shape
        flat = replace(tensor, shape=(heads * rows, width))
        with self._reserving(f"the weight {tensor.name}"):
            return stacked_values([flat], self.target.dtype, self.target.workspace).view(heads, rows, width)

    def stored_as(self, tensor: Tensor) -> StoredAs:
        return storage_of(tensor, self.target.rules).as_stored()


def host_workspace(tilings: Tilings) -> Workspace:
    return Workspace(SplitKScratch(torch.empty(0), torch.zeros(0, dtype=torch.int32)), 0, tilings)
