"""Splits the kv_b tensor of MLA, which holds keys and values of all heads, into a matrix for each head."""

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
    """Returns the tensors, by canonical name, with each kv_b split into k_b and v_b.

    Only rows can be quantized, and they must be those that products read: the rows of k_b are columns of kv_b.
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
    """Does what `split_heads` does, but makes the bytes of a head only when they are asked for."""
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
    """Returns the scales of these rows, if the tensor has any."""
    scales = tensor.scales
    return scales and Scales(scales.values[rows.reshape(-1) // scales.rows], 1, scales.columns)


def rows_at(tensor: Tensor, rows: NDArray[np.intp]) -> Tensor:
    """Returns a matrix for each head, given the numbers of its rows [heads, count]: [heads, count, width]."""
    data, shape = tensor.data.reshape(tensor.shape[0], -1), (*rows.shape, tensor.shape[1])
    return replace(
        tensor,
        shape=shape,
        source=data[rows].reshape(-1),
        scales=scales_at(tensor, rows),
        role=Role.MLA_HEADS,
    )


def transpose_heads(tensor: Tensor) -> Tensor:
    """Returns the matrix of each head transposed. One that is quantized along its rows becomes F16."""
    format, data = tensor.format, tensor.data
    if format.name not in PLAIN:
        format, data = FORMATS["F16"], dequantize(flat(tensor)).astype(np.float16).reshape(-1).view(np.uint8)
    values = np.ascontiguousarray(data.view(f"u{format.bytes}").reshape(tensor.shape).swapaxes(1, 2))
    return replace(tensor, format=format, shape=values.shape, source=values.reshape(-1).view(np.uint8), scales=None)
