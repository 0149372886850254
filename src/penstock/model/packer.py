"""Hands a checkpoint's tensors to a backend for packing; checks their shapes and that each one is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MalformedFile
from penstock.model.dequantize import dequantize
from penstock.model.low_rank import PlacedPart, Placement, Spans
from penstock.model.roles import Role
from penstock.model.spec import ExpertSpec
from penstock.model.split_heads import split_heads
from penstock.model.tensor import FORMATS, PLAIN, Stack, Tensor, some_rows

Floats = NDArray[np.float32]
SHORT_SPAN = 16  # rows; shorter spans are copied together, because each part of a weight is padded


class Packs(Protocol):
    """Lists the backend methods that a packer needs (see backend/base.py)."""

    def pack_matrix(self, parts: Any, bias: Any) -> Any: ...

    def pack_vector(self, tensor: Tensor) -> Any: ...

    def pack_experts(self, up: Any, down: Any, choice_bias: Any) -> Any: ...

    def pack_heads(self, tensor: Tensor) -> Any: ...


class Packer:
    """Packs the tensors that a model asks for by canonical name."""

    def __init__(self, tensors: Mapping[str, Tensor], backend: Packs) -> None:
        self._tensors = tensors
        self._backend = backend
        self.placements: list[Placement] = []  # the tensors of each packed matrix
        self._used: set[str] = set()
        self._logged_transposed = False

    def vector(self, name: str, size: int, plus: float = 0.0) -> Any:
        """Packs a vector; `plus` is added to every value."""
        if plus:
            return self.computed(name, size, lambda values: values + np.float32(plus))
        return self._backend.pack_vector(self._take(name, (size,)))

    def computed(self, name: str, size: int, made: Callable[[Floats], Floats]) -> Any:
        """Packs a vector that `made` computes from the named one."""
        tensor = self._take(name, (size,))
        values = made(dequantize(tensor)).astype(np.float32)
        return self._pack_computed(tensor, values)

    def joined(self, *parts: tuple[str, int]) -> Any:
        tensors = [self._take(name, (size,)) for name, size in parts]
        return self._pack_computed(tensors[0], np.concatenate([dequantize(tensor) for tensor in tensors]))

    def number(self, name: str) -> float:
        return float(dequantize(self._take(name, (1,)))[0])

    def ones(self, size: int) -> Any:
        return self._backend.pack_vector(
            Tensor("ones", FORMATS["F32"], (size,), np.ones(size, np.float32).view(np.uint8), role=Role.NORM)
        )

    def product(self, name: str, other: str, size: int) -> Any:
        factors = dequantize(self._take(other, (size,)))
        return self.computed(name, size, lambda values: values * factors)

    def matrix(self, *parts: tuple[str, int] | tuple[str, int, Spans], width: int) -> Any:
        """Packs one weight of stacked parts (name, rows). A part may list spans to take only those rows. A part's bias
        is named after it, plus ".bias".
        """
        packed = self._backend.pack_matrix(*self._stack(*parts, width=width))
        self.placements.append(Placement(packed, tuple(PlacedPart(*part) for part in parts)))
        return packed

    def experts(self, layer: str, spec: ExpertSpec, width: int) -> Any:
        names = [f"{layer}.experts.{expert}" for expert in range(spec.count)]
        parts = ("gate", "up") if spec.gated else ("up",)
        up = [self._stack(*((f"{name}.{part}", spec.hidden) for part in parts), width=width) for name in names]
        down = [self._stack((f"{name}.down", width), width=spec.hidden) for name in names]
        choice_bias = self._take(f"{layer}.choice_bias", (spec.count,)) if spec.choice_bias else None
        return self._backend.pack_experts(up, down, choice_bias)

    def table(self, name: str, first: int, count: int, width: int, plus: str = "") -> Any:
        """Packs `count` rows of a table, adding the first row of table `plus` to each if given."""
        table = self._take_rows(name, first + count, width)
        values = dequantize(table)[first : first + count]
        return self._pack_values(table, values + dequantize(self._take_rows(plus, 1, width))[0] if plus else values)

    def repeated(self, name: str, count: int, width: int) -> Any:
        table = self._take_rows(name, 1, width)
        return self._pack_values(table, np.repeat(dequantize(table)[:1], count, axis=0))

    def twice(self, name: str, count: int, width: int, types: str) -> Any:
        """Packs a table of `count` rows twice; the second copy has the difference between the second and the first row
        of table `types` added.
        """
        table = self._take(name, (count, width))
        first, second = dequantize(self._take_rows(types, 2, width))[:2]
        values = dequantize(table)
        return self._pack_values(table, np.concatenate([values, values + (second - first)]))

    def heads(self, name: str, heads: int, rows: int, width: int) -> Any:
        return self._backend.pack_heads(self._take(name, (heads, rows, width)))

    def keys_and_values(self, name: str, heads: int, keys: int, values: int, width: int) -> tuple[Any, Any]:
        """Packs two matrices per head from a tensor that has each head's key rows before its value rows. The key matrix
        is transposed.
        """
        tensor = self._take(name, (heads * (keys + values), width))
        if tensor.format.name not in PLAIN and not self._logged_transposed:
            import logging  # slow to import

            self._logged_transposed = True
            logging.getLogger(__name__).info(
                "the keys' half of each kv_b, such as %s, is transposed and becomes F16", tensor.name
            )
        first, then = split_heads(tensor, heads, keys)
        return self._backend.pack_heads(first), self._backend.pack_heads(then)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def check_all_used(self) -> None:
        """Raises if a tensor was never requested: the model would be computed wrongly."""
        unused = sorted(self._tensors.keys() - self._used)
        if unused:
            names = ", ".join(self._tensors[name].name for name in unused[:4])
            raise MalformedFile(
                f"{len(unused)} tensors of the checkpoint have no place in this architecture: {names}"
                f"{' ...' if len(unused) > 4 else ''}"
            )

    def _stack(self, *parts: tuple[str, int] | tuple[str, int, Spans], width: int) -> Stack:
        tensors: list[Tensor] = []
        biases: list[Tensor | None] = []
        for name, rows, *spans in parts:
            tensor = self._take(name, (rows, width))
            taken = pieces(tensor, spans[0]) if spans else [tensor]
            tensors += taken
            biases += [self._take(f"{name}.bias", (rows,)) if f"{name}.bias" in self._tensors else None] * len(taken)
        return Stack(tensors, biases)

    def _pack_computed(self, tensor: Tensor, values: Floats) -> Any:
        made = replace(tensor, format=FORMATS["F32"], shape=values.shape, source=values.view(np.uint8))
        return self._backend.pack_vector(made)

    def _pack_values(self, table: Tensor, values: Floats) -> Any:
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        made = replace(table, format=FORMATS["F32"], shape=values.shape, source=data, scales=None)
        return self._backend.pack_matrix([made], [None])

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


def pieces(tensor: Tensor, spans: Spans) -> list[Tensor]:
    """Returns spans of a matrix's rows in order: views, or one copy if a span is short."""
    parts = [some_rows(tensor, first, last) for first, last in spans]
    if min(last - first for first, last in spans) >= SHORT_SPAN:
        return parts
    data = np.concatenate([part.data for part in parts])
    scales = tensor.scales and tensor.scales._replace(
        values=np.concatenate([part.scales.values for part in parts if part.scales]), rows=1
    )
    rows = sum(part.shape[0] for part in parts)
    return [replace(tensor, shape=(rows, tensor.shape[1]), source=data, scales=scales)]
