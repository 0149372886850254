"""Splits MLA's kv_b tensor, which holds keys and values of all heads, into a matrix for each head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MalformedFile
from penstock.model.dequantize import dequantize
from penstock.model.roles import Role
from penstock.model.spec import ModelSpec
from penstock.model.tensor import FORMATS, PLAIN, Bytes, Scales, Tensor, flat, some_rows


def split_kv_b(tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Splits each kv_b into k_b and v_b.

    Quantization blocks run along rows, so they must match the rows that products read: the rows of k_b are columns of
    kv_b.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if spec.mla is None or tensor.role is not Role.MLA_KV_B:
            found[name] = tensor
            continue
        heads, keys = spec.attn.heads, spec.mla.qk_nope_head_dim
        wanted = (heads * (keys + spec.mla.v_head_dim), spec.attn.v_dim)
        if tensor.shape != wanted:
            raise MalformedFile(f"tensor {tensor.name!r} has shape {tensor.shape}; the model's config needs {wanted}")
        layer = name.removesuffix("kv_b")
        found[f"{layer}k_b"], found[f"{layer}v_b"] = split_heads_when_read(tensor, heads, keys)
    return found


def split_heads(tensor: Tensor, heads: int, first: int) -> tuple[Tensor, Tensor]:
    """Returns the first rows of each head, transposed, and the rest: [heads, width, first], [heads, rest, width]."""
    rows = np.arange(tensor.shape[0]).reshape(heads, -1)
    return transpose_heads(rows_at(tensor, rows[:, :first])), rows_at(tensor, rows[:, first:])


def split_heads_when_read(tensor: Tensor, heads: int, first: int) -> tuple[Tensor, Tensor]:
    """Splits like `split_heads`, but reads a head's bytes only on demand."""
    each, width = tensor.shape[0] // heads, tensor.shape[1]

    def half(which: int, count: int) -> Callable[[int, int], Bytes]:
        def rows(start: int, end: int) -> Bytes:
            head, last = start // count, -(-end // count)
            made = split_heads(some_rows(tensor, head * each, last * each), last - head, first)[which]
            return some_rows(flat(made), start - head * count, end - head * count).data

        return rows

    others = np.arange(tensor.shape[0]).reshape(heads, each)[:, first:]
    format = tensor.format if tensor.format.name in PLAIN else FORMATS["F16"]
    per_head = replace(tensor, role=Role.MLA_HEADS)
    return (
        replace(per_head, format=format, shape=(heads, width, first), source=half(0, width), scales=None),
        replace(
            per_head,
            shape=(heads, each - first, width),
            source=half(1, each - first),
            scales=scales_at(tensor, others),
        ),
    )


def scales_at(tensor: Tensor, rows: NDArray[np.intp]) -> Scales | None:
    scales = tensor.scales
    return scales and Scales(scales.values[rows.reshape(-1) // scales.rows], 1, scales.columns)


def rows_at(tensor: Tensor, rows: NDArray[np.intp]) -> Tensor:
    """Returns a matrix per head from row numbers [heads, count]: [heads, count, width]."""
    data, shape = tensor.data.reshape(tensor.shape[0], -1), (*rows.shape, tensor.shape[1])
    return replace(
        tensor,
        shape=shape,
        source=data[rows].reshape(-1),
        scales=scales_at(tensor, rows),
        role=Role.MLA_HEADS,
    )


def transpose_heads(tensor: Tensor) -> Tensor:
    """Transposes the matrix of each head. Row-quantized formats become F16."""
    format, data = tensor.format, tensor.data
    if format.name not in PLAIN:
        format, data = FORMATS["F16"], dequantize(flat(tensor)).astype(np.float16).reshape(-1).view(np.uint8)
    values = np.ascontiguousarray(data.view(f"u{format.bytes}").reshape(tensor.shape).swapaxes(1, 2))
    return replace(tensor, format=format, shape=values.shape, source=values.reshape(-1).view(np.uint8), scales=None)
