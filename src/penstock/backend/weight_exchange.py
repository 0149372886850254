"""Keeps the weights that a backend has packed, so that others can replace them while the engine runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from penstock.model.packer import Packs
from penstock.model.tensor import Stack, Tensor

MATRIX, VECTOR, EXPERTS, HEADS = "matrix", "vector", "experts", "heads"


class PackedWeight(NamedTuple):
    """Is what one call of a packer returned."""

    kind: str
    weight: Any


class KeepingPacker:
    """Packs with a backend, and keeps everything that it packed, in order."""

    def __init__(self, packer: Packs) -> None:
        self._packer = packer
        self.kept: list[PackedWeight] = []

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Any:
        return self._keep(MATRIX, self._packer.pack_matrix(parts, bias))

    def pack_vector(self, tensor: Tensor) -> Any:
        return self._keep(VECTOR, self._packer.pack_vector(tensor))

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> Any:
        return self._keep(EXPERTS, self._packer.pack_experts(up, down, choice_bias))

    def pack_heads(self, tensor: Tensor) -> Any:
        return self._keep(HEADS, self._packer.pack_heads(tensor))

    def _keep(self, kind: str, weight: Any) -> Any:
        self.kept.append(PackedWeight(kind, weight))
        return weight


class ReplayingPacker:
    """Returns weights that another process has packed, in the order in which it packed them."""

    def __init__(self, weights: Iterable[PackedWeight]) -> None:
        self._weights = iter(weights)

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Any:
        return self._next(MATRIX)

    def pack_vector(self, tensor: Tensor) -> Any:
        return self._next(VECTOR)

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> Any:
        return self._next(EXPERTS)

    def pack_heads(self, tensor: Tensor) -> Any:
        return self._next(HEADS)

    def _next(self, kind: str) -> Any:
        packed, weight = next(self._weights)
        assert packed == kind, "one model packs the same kinds of weights in the same order"
        return weight


class PairingPacker(KeepingPacker):
    """Packs weights that take the place of loaded ones. Where a kind is `paired` it returns the loaded weight, which
    gets the new values when weights are exchanged: adapters, and graphs of launches, know weights by their identity."""

    def __init__(self, packer: Packs, loaded: Iterable[PackedWeight], paired: Sequence[str]) -> None:
        super().__init__(packer)
        self._loaded = iter([each for each in loaded if each.kind in paired])
        self._paired = paired
        self.pairs: list[tuple[Any, Any]] = []  # (loaded, new)

    def _keep(self, kind: str, weight: Any) -> Any:
        if kind not in self._paired:
            return weight
        expected, loaded = next(self._loaded)
        assert kind == expected, "a model of the same architecture packs the same kinds of weights in the same order"
        self.pairs.append((loaded, weight))
        return loaded
