"""Reorders tensors of a Hugging Face folder to the family's GGUF layout, where the two differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.model import decoder
from penstock.model.dequantize import dequantize
from penstock.model.recurrence import ConvSpec, DeltaSpec, MambaSpec
from penstock.model.roles import Role
from penstock.model.spec import ModelSpec
from penstock.model.tensor import FORMATS, Bytes, Scales, Tensor, some_rows

Order = NDArray[np.intp]
Tensors = Mapping[str, Tensor]  # canonical name: tensor


def reorder_for_gguf(tensors: Tensors, spec: ModelSpec) -> Tensors:
    reorder = REORDER.get(spec.arch)
    if reorder is None:
        return tensors
    return {ours: made for name, tensor in tensors.items() for ours, made in reorder(name, tensor, spec)}


def rows_in(tensor: Tensor, order: Order) -> Tensor:
    scales = tensor.scales
    if scales is not None:
        scales = Scales(scales.values[order // scales.rows], 1, scales.columns)

    def rows(first: int, last: int) -> Bytes:
        return tensor.data.reshape(tensor.shape[0], -1)[order[first:last]].reshape(-1)

    vector = len(tensor.shape) == 1
    source = rows(0, len(order)) if vector else rows
    return replace(tensor, shape=(len(order), *tensor.shape[1:]), source=source, scales=scales)


def columns_in(tensor: Tensor, order: Order) -> Tensor:
    """Permutes a matrix's columns, in F32: quantized formats share scales among neighbours of a row."""

    def rows(first: int, last: int) -> Bytes:
        return np.ascontiguousarray(dequantize(some_rows(tensor, first, last))[:, order]).reshape(-1).view(np.uint8)

    return replace(tensor, format=FORMATS["F32"], source=rows, scales=None)


# ---- delta nets ----


def hybrid_layout(name: str, tensor: Tensor, spec: ModelSpec, tiled: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a hybrid model. `tiled`: value head h belongs to key head h % k_heads in the file."""
    d = spec.recurrence
    assert isinstance(d, DeltaSpec)
    layer, _, part = name.rpartition(".")
    if part == "delta_qkvz":
        qkv, z = fused_rows(d)
        yield f"{layer}.delta_qkv", rows_in(tensor, qkv)
        yield f"{layer}.delta_z", rows_in(tensor, z)
    elif part == "decay_log":
        values = -np.exp(dequantize(tensor))
        made = replace(tensor, format=FORMATS["F32"], source=values.astype("<f4").view(np.uint8))
        yield f"{layer}.decay", tiled_heads("decay", made, d) if tiled else made
    elif tensor.role is Role.CONV:
        made = replace(tensor, shape=(d.width, d.conv_width))
        yield name, tiled_heads(part, made, d) if tiled else made
    elif tensor.role is Role.SHARED_EXPERT_GATE:
        yield name, replace(tensor, shape=tensor.shape[1:])
    else:
        yield name, tiled_heads(part, tensor, d) if tiled else tensor


def fused_rows(d: DeltaSpec) -> tuple[Order, Order]:
    """Returns the rows of q, k and v, and those of z, in a tensor interleaved by key head."""
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


# ---- convolutions and selective scans ----


def convolving_layout(name: str, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of LFM2 and Jamba: in the file, convolutions and decays are matrices, and decays are not
    stored as logarithms.
    """
    layer, _, part = name.rpartition(".")
    width = spec.recurrence.width if isinstance(spec.recurrence, ConvSpec) else 0
    if isinstance(spec.recurrence, MambaSpec):
        width = spec.recurrence.scan.width
    if tensor.role is Role.CONV:
        yield name, replace(tensor, shape=(width, tensor.shape[0] // width))
    elif part == "decay_log":
        values = (-np.exp(dequantize(tensor))).astype("<f4").view(np.uint8)
        shape = (width, tensor.shape[0] // width)
        yield f"{layer}.decay", replace(tensor, format=FORMATS["F32"], shape=shape, source=values)
    else:
        yield name, tensor


# ---- encoders ----


def encoder_layout(name: str, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yields an encoder's tensors; the position table keeps only the used rows."""
    if name == "positions":
        tensor = some_rows(tensor, spec.first_position, spec.first_position + spec.max_len)
    yield name, tensor


# ---- norms per head ----


def norms_of_heads(name: str, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    by_head = name.endswith((".q_norm", ".k_norm"))
    yield (
        name,
        replace(tensor, shape=(tensor.shape[0] // spec.attn.head_dim, spec.attn.head_dim)) if by_head else tensor,
    )


REORDER: dict[str, Callable[[str, Tensor, ModelSpec], Iterator[tuple[str, Tensor]]]] = {
    "qwen3next": partial(hybrid_layout, tiled=False),
    "qwen35": partial(hybrid_layout, tiled=True),
    "bert": encoder_layout,
    "cohere": norms_of_heads,
    "stablelm": norms_of_heads,
    "jamba": convolving_layout,
    "lfm2": convolving_layout,
}
