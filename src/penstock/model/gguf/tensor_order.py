"""Tensors of a Hugging Face folder as GGUF files of their family hold them, where that is another order or form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.model import decoder
from penstock.model.dequantize import dequantize
from penstock.model.spec import DeltaSpec, ModelSpec
from penstock.model.tensor import FORMATS, Bytes, Scales, Tensor, some_rows

Order = NDArray[np.intp]
Tensors = Mapping[str, Tensor]  # by canonical name


def laid_out(tensors: Tensors, spec: ModelSpec) -> Tensors:
    lay = LAYOUTS.get(spec.arch)
    if lay is None:
        return tensors
    return {ours: made for name, tensor in tensors.items() for ours, made in lay(name, tensor, spec)}


def rows_in(tensor: Tensor, order: Order) -> Tensor:
    """Those rows of a matrix, or values of a vector, made when they are asked for."""
    scales = tensor.scales
    if scales is not None:
        scales = Scales(scales.values[order // scales.rows], 1, scales.columns)

    def rows(first: int, last: int) -> Bytes:
        return tensor.data.reshape(tensor.shape[0], -1)[order[first:last]].reshape(-1)

    vector = len(tensor.shape) == 1
    return Tensor(
        tensor.name, tensor.format, (len(order), *tensor.shape[1:]), rows(0, len(order)) if vector else rows, scales
    )


def columns_in(tensor: Tensor, order: Order) -> Tensor:
    """In F32, as formats hold neighbours of a row together."""

    def rows(first: int, last: int) -> Bytes:
        return np.ascontiguousarray(dequantize(some_rows(tensor, first, last))[:, order]).reshape(-1).view(np.uint8)

    return Tensor(tensor.name, FORMATS["F32"], tensor.shape, rows)


# ---- delta nets ----


def hybrid_layout(name: str, tensor: Tensor, spec: ModelSpec, tiled: bool) -> Iterator[tuple[str, Tensor]]:
    """`tiled`: value heads lie in an order in which those of one key head are as far apart as there are key heads."""
    d = spec.delta
    assert d is not None
    layer, _, part = name.rpartition(".")
    if part == "delta_qkvz":
        qkv, z = fused_rows(d)
        yield f"{layer}.delta_qkv", rows_in(tensor, qkv)
        yield f"{layer}.delta_z", rows_in(tensor, z)
    elif part == "decay_log":
        values = -np.exp(dequantize(tensor))
        made = Tensor(tensor.name, FORMATS["F32"], tensor.shape, values.astype("<f4").view(np.uint8))
        yield f"{layer}.decay", tiled_heads("decay", made, d) if tiled else made
    elif part == "conv":
        made = replace(tensor, shape=(d.width, d.conv_width))
        yield name, tiled_heads(part, made, d) if tiled else made
    elif name.endswith(".shared.router"):
        yield name, replace(tensor, shape=tensor.shape[1:])
    else:
        yield name, tiled_heads(part, tensor, d) if tiled else tensor


def fused_rows(d: DeltaSpec) -> tuple[Order, Order]:
    """Where queries, keys and values are in a tensor that has them for one key head after the other, and where z is."""
    shared = d.v_heads // d.k_heads * d.v_dim
    kinds = decoder.alternating(d.k_heads, d.k_dim, d.k_dim, shared, shared)
    q, k, v, z = (np.concatenate([np.arange(*span) for span in spans]) for spans in kinds)
    return np.concatenate([q, k, v]), z


def tiled_heads(part: str, tensor: Tensor, d: DeltaSpec) -> Tensor:
    heads = np.arange(d.v_heads).reshape(d.k_heads, -1).T.reshape(-1)
    values = (heads[:, None] * d.v_dim + np.arange(d.v_dim)).reshape(-1)
    match part:
        case "delta_qkv" | "conv":
            return rows_in(tensor, np.concatenate([np.arange(2 * d.k_width), 2 * d.k_width + values]))
        case "delta_z":
            return rows_in(tensor, values)
        case "delta_o":
            return columns_in(tensor, values)
        case "delta_a" | "delta_b" | "decay" | "dt":
            return rows_in(tensor, heads)
    return tensor


# ---- encoders ----


def encoder_layout(name: str, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Positions that are counted from 0, up to the longest prompt."""
    if name == "positions":
        tensor = some_rows(tensor, spec.first_position, spec.first_position + spec.max_len)
    yield name, tensor


LAYOUTS: dict[str, Callable[[str, Tensor, ModelSpec], Iterator[tuple[str, Tensor]]]] = {
    "qwen3next": partial(hybrid_layout, tiled=False),
    "qwen35": partial(hybrid_layout, tiled=True),
    "bert": encoder_layout,
}
