"""From a checkpoint's tensors to packed weights: shapes are checked here, and every tensor must be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MalformedFile
from penstock.model.quant import dequantize
from penstock.model.spec import ExpertSpec
from penstock.model.tensor import FORMATS, Stack, Tensor


class Packs(Protocol):
    """What a packer needs of a backend (see backend/base.py)."""

    def pack_matrix(self, parts: Any, bias: Any) -> Any: ...

    def pack_vector(self, tensor: Tensor) -> Any: ...

    def pack_experts(self, up: Any, down: Any, choice_bias: Any) -> Any: ...


class Packer:
    """Hands tensors to a backend by their canonical names."""

    def __init__(self, tensors: Mapping[str, Tensor], backend: Packs) -> None:
        self._tensors = tensors
        self._backend = backend
        self._used: set[str] = set()

    def vector(self, name: str, size: int, plus: float = 0.0) -> Any:
        """`plus` is added to every value."""
        tensor = self._take(name, (size,))
        if plus:
            values = dequantize(tensor) + np.float32(plus)
            tensor = Tensor(tensor.name, FORMATS["F32"], tensor.shape, values.view(np.uint8))
        return self._backend.pack_vector(tensor)

    def matrix(self, *parts: tuple[str, int], width: int) -> Any:
        """One weight of several named parts (name, rows) stacked; a part's bias is its name + ".bias"."""
        return self._backend.pack_matrix(*self._stack(*parts, width=width))

    def experts(self, layer: str, spec: ExpertSpec, width: int) -> Any:
        """All experts of a layer, and the bias of their choice."""
        names = [f"{layer}.experts.{expert}" for expert in range(spec.count)]
        up = [self._stack((f"{name}.gate", spec.hidden), (f"{name}.up", spec.hidden), width=width) for name in names]
        down = [self._stack((f"{name}.down", width), width=spec.hidden) for name in names]
        choice_bias = self._take(f"{layer}.choice_bias", (spec.count,)) if spec.choice_bias else None
        return self._backend.pack_experts(up, down, choice_bias)

    def table(self, name: str, first: int, count: int, width: int, plus: str) -> Any:
        """So many rows of a table; to each the first row of table `plus` is added."""
        table = self._take_rows(name, first + count, width)
        added = dequantize(self._take_rows(plus, 1, width))[0]
        return self._pack_values(table.name, dequantize(table)[first : first + count] + added)

    def repeated(self, name: str, count: int, width: int) -> Any:
        """A table of so many rows, all of them the first of another."""
        table = self._take_rows(name, 1, width)
        return self._pack_values(table.name, np.repeat(dequantize(table)[:1], count, axis=0))

    def check_all_used(self) -> None:
        """A tensor that nothing asked for means the model would be computed wrongly."""
        unused = sorted(self._tensors.keys() - self._used)
        if unused:
            names = ", ".join(self._tensors[name].name for name in unused[:4])
            raise MalformedFile(
                f"{len(unused)} tensors of the checkpoint have no place in this architecture: {names}"
                f"{' ...' if len(unused) > 4 else ''}"
            )

    def _stack(self, *parts: tuple[str, int], width: int) -> Stack:
        tensors = [self._take(name, (rows, width)) for name, rows in parts]
        biases = [
            self._take(f"{name}.bias", (rows,)) if f"{name}.bias" in self._tensors else None for name, rows in parts
        ]
        return Stack(tensors, biases)

    def _pack_values(self, name: str, values: NDArray[np.float32]) -> Any:
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        return self._backend.pack_matrix([Tensor(name, FORMATS["F32"], values.shape, data)], [None])

    def _take_rows(self, name: str, least: int, width: int) -> Tensor:
        found = self._tensors[name].shape if name in self._tensors else ()
        if len(found) == 2 and found[0] < least:
            raise MalformedFile(
                f"tensor {self._tensors[name].name!r} has {found[0]} rows; the model's config needs {least}"
            )
        return self._take(name, (found[0] if len(found) == 2 else least, width))

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise MalformedFile(f"the checkpoint has no tensor for {name!r}; it may be truncated or of another kind")
        if tensor.shape != shape:
            raise MalformedFile(f"tensor {tensor.name!r} has shape {tensor.shape}; the model's config needs {shape}")
        self._used.add(name)
        return tensor
