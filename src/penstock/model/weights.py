"""From a checkpoint's tensors to packed weights: shapes are checked here, and every tensor must be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MalformedFile
from penstock.model.dequantize import dequantize
from penstock.model.spec import ExpertSpec
from penstock.model.tensor import FORMATS, PLAIN, Bytes, Scales, Stack, Tensor, flat, some_rows

Floats = NDArray[np.float32]
Spans = Sequence[tuple[int, int]]  # rows, from and to which
SHORT = 16  # rows: fewer are copied together, as every part of a weight is padded


class Packs(Protocol):
    """What a packer needs of a backend (see backend/base.py)."""

    def pack_matrix(self, parts: Any, bias: Any) -> Any: ...

    def pack_vector(self, tensor: Tensor) -> Any: ...

    def pack_experts(self, up: Any, down: Any, choice_bias: Any) -> Any: ...

    def pack_heads(self, tensor: Tensor) -> Any: ...


class Packer:
    """Hands tensors to a backend by their canonical names."""

    def __init__(self, tensors: Mapping[str, Tensor], backend: Packs) -> None:
        self._tensors = tensors
        self._backend = backend
        self._used: set[str] = set()
        self._said = False

    def vector(self, name: str, size: int, plus: float = 0.0) -> Any:
        """`plus` is added to every value."""
        if plus:
            return self.computed(name, size, lambda values: values + np.float32(plus))
        return self._backend.pack_vector(self._take(name, (size,)))

    def computed(self, name: str, size: int, made: Callable[[Floats], Floats]) -> Any:
        """A vector made of another."""
        tensor = self._take(name, (size,))
        values = made(dequantize(tensor)).astype(np.float32)
        return self._backend.pack_vector(Tensor(tensor.name, FORMATS["F32"], tensor.shape, values.view(np.uint8)))

    def matrix(self, *parts: tuple[str, int] | tuple[str, int, Spans], width: int) -> Any:
        """One weight of several named parts (name, rows) stacked, or of rows of theirs from and to which; a part's bias
        is its name + ".bias"."""
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

    def heads(self, name: str, heads: int, rows: int, width: int) -> Any:
        """A matrix for each head."""
        return self._backend.pack_heads(self._take(name, (heads, rows, width)))

    def keys_and_values(self, name: str, heads: int, keys: int, values: int, width: int) -> tuple[Any, Any]:
        """Two of them from one tensor, in which those of a head follow each other: of keys the transposed one, and
        values are read as they lie there."""
        tensor = self._take(name, (heads * (keys + values), width))
        if tensor.format.name not in PLAIN and not self._said:
            import logging  # takes longer than packing most models

            self._said = True
            logging.getLogger(__name__).info("half of %s and its like become F16: they are transposed", tensor.name)
        first, then = split_heads(tensor, heads, keys)
        return self._backend.pack_heads(first), self._backend.pack_heads(then)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def check_all_used(self) -> None:
        """A tensor that nothing asked for means the model would be computed wrongly."""
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


def split_heads(tensor: Tensor, heads: int, first: int) -> tuple[Tensor, Tensor]:
    """Of each head the first rows, transposed, and the others: [heads, width, first], [heads, others, width]."""
    rows = np.arange(tensor.shape[0]).reshape(heads, -1)
    return turned(rows_at(tensor, rows[:, :first])), rows_at(tensor, rows[:, first:])


def split_heads_later(tensor: Tensor, heads: int, first: int) -> tuple[Tensor, Tensor]:
    """The same, made when their bytes are asked for, of those heads that are."""
    each, width = tensor.shape[0] // heads, tensor.shape[1]

    def half(which: int, count: int) -> Callable[[int, int], Bytes]:
        def rows(start: int, end: int) -> Bytes:
            head, last = start // count, -(-end // count)
            made = split_heads(some_rows(tensor, head * each, last * each), last - head, first)[which]
            return some_rows(flat(made), start - head * count, end - head * count).data

        return rows

    others = np.arange(tensor.shape[0]).reshape(heads, each)[:, first:]
    kind = tensor.format if tensor.format.name in PLAIN else FORMATS["F16"]
    return (
        Tensor(tensor.name, kind, (heads, width, first), half(0, width)),
        Tensor(
            tensor.name, tensor.format, (heads, each - first, width), half(1, each - first), scales_at(tensor, others)
        ),
    )


def scales_at(tensor: Tensor, rows: NDArray[np.intp]) -> Scales | None:
    scales = tensor.scales
    return scales and Scales(scales.values[rows.reshape(-1) // scales.rows], 1, scales.columns)


def rows_at(tensor: Tensor, rows: NDArray[np.intp]) -> Tensor:
    """A matrix of each row of numbers of rows: [heads, count, width]."""
    data, shape = tensor.data.reshape(tensor.shape[0], -1), (*rows.shape, tensor.shape[1])
    return Tensor(tensor.name, tensor.format, shape, data[rows].reshape(-1), scales_at(tensor, rows))


def turned(tensor: Tensor) -> Tensor:
    """The matrix of each head. One that is quantized along its rows becomes F16."""
    kind, data = tensor.format, tensor.data
    if kind.name not in PLAIN:
        kind, data = FORMATS["F16"], dequantize(flat(tensor)).astype(np.float16).reshape(-1).view(np.uint8)
    values = np.ascontiguousarray(data.view(f"u{kind.bytes}").reshape(tensor.shape).swapaxes(1, 2))
    return Tensor(tensor.name, kind, values.shape, values.reshape(-1).view(np.uint8))


def pieces(tensor: Tensor, spans: Spans) -> list[Tensor]:
    """Rows of a matrix, in this order: views of it where they are long."""
    parts = [some_rows(tensor, first, last) for first, last in spans]
    if min(last - first for first, last in spans) >= SHORT:
        return parts
    data = np.concatenate([part.data for part in parts])
    scales = tensor.scales and tensor.scales._replace(
        values=np.concatenate([part.scales.values for part in parts if part.scales]), rows=1
    )
    return [Tensor(tensor.name, tensor.format, (sum(part.shape[0] for part in parts), tensor.shape[1]), data, scales)]
