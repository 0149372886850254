"""Splits tensors that hold several weights; the parts are views."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.roles import Role
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor, every_other_row, flat, rows_of_groups, some_rows, transposed

FUSED = re.compile(r"(layers\.\d+\.(?:experts\.\d+\.|shared\.)?)(qkv|grouped_qkv|gate_up|kv_a)(\.bias)?")
HEAD_NORM = re.compile(r"(layers\.\d+\.[qk]_norm)\.\d+")
ALL_EXPERTS = re.compile(
    r"(layers\.\d+\.experts\.)((gate|up|gate_up|down|interleaved)(?:_transposed|_either)?(?:\.bias)?)"
)
# their shapes vary between files
VECTORS = (Role.CONV, Role.ROUTER_BIAS, Role.NORM, Role.SSM_NORM, Role.HEAD_PARAMETER)


def split_fused(tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    qkv = {"q": spec.attn.q_width, "k": spec.attn.kv_width, "v": spec.attn.kv_width}
    parts = {
        "qkv": qkv,
        "grouped_qkv": qkv,  # each KV head follows the queries that share it
        "gate_up": {"gate": spec.hidden, "up": spec.hidden},
        "kv_a": {"latent": spec.attn.v_dim, "k_rope": spec.attn.head_dim - spec.attn.v_dim},
    }
    expert_parts = dict.fromkeys(("gate", "up"), spec.experts.hidden if spec.experts else 0)
    # Granite 4 calls an MLP shared even without experts.
    shared_parts = dict.fromkeys(("gate", "up"), spec.shared_hidden if spec.experts else spec.hidden)
    found: dict[str, Tensor] = {}
    for name, tensor in split_experts(tensors, spec):
        if match := FUSED.fullmatch(name):
            suffix = match[3] or ""
            wanted = shared_parts if ".shared." in name else expert_parts if ".experts." in name else parts[match[2]]
            groups = spec.attn.kv_heads if match[2] == "grouped_qkv" else 1
            pieces = split(tensor, wanted, 1 if suffix else 2, groups)
            found |= {match[1] + part + suffix: piece for part, piece in pieces}
        elif tensor.role in VECTORS:
            found[name] = replace(tensor, shape=(prod(tensor.shape),))
        elif tensor.role is Role.SHARED_EXPERT_GATE:  # its shape varies between files
            found[name] = replace(tensor, shape=(1, prod(tensor.shape)))
        elif tensor.role is Role.STREAM_PROJECTION and len(tensor.shape) == 3:
            found |= {f"{name}.{i}": one for i, one in enumerate(matrices_of(tensor))}
        else:
            found[name] = tensor
    return joined_norms(found, spec)


def joined_norms(tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if not HEAD_NORM.fullmatch(name)}
    heads = {"q_norm": spec.attn.heads, "k_norm": spec.attn.kv_heads}
    for joined in dict.fromkeys(match[1] for name in tensors if (match := HEAD_NORM.fullmatch(name))):
        count = heads[joined.rpartition(".")[2]]
        if missing := next((f"{joined}.{i}" for i in range(count) if f"{joined}.{i}" not in tensors), ""):
            raise MalformedFile(f"the checkpoint has no tensor for {missing!r}; it may be truncated")
        parts = [f"{joined}.{head}" for head in range(count)]
        first = tensors[parts[0]]
        if {tensors[part].format for part in parts} != {first.format}:
            raise UnsupportedModel(f"tensor {first.name!r} has another format than the norms of other heads")
        data = np.concatenate([tensors[part].data for part in parts])
        found[joined] = replace(first, shape=(sum(prod(tensors[part].shape) for part in parts),), source=data)
    return found


def matrices_of(stacked: Tensor) -> Iterator[Tensor]:
    count, rows, _ = stacked.shape
    for i in range(count):
        yield some_rows(flat(stacked), i * rows, (i + 1) * rows)


def split_experts(tensors: Mapping[str, Tensor], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if match := ALL_EXPERTS.fullmatch(name):
            for i, one in enumerate(each_expert(tensor, spec)):
                yield from parts_of(f"{match[1]}{i}.", match[2], one, spec)
        else:
            yield name, tensor


def parts_of(expert: str, name: str, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of one expert's tensor, which may be stored as (in, out) or interleave gate and up."""
    whole, _, suffix = name.partition(".")
    part = whole.removesuffix("_transposed").removesuffix("_either")
    inputs = spec.experts.hidden if spec.experts and part == "down" else spec.dim
    if whole.endswith("_transposed") or (whole.endswith("_either") and tensor.shape[-1] != inputs):
        tensor = transposed(tensor)
    suffix = suffix and f".{suffix}"
    if part != "interleaved":
        yield f"{expert}{part}{suffix}", tensor
    else:
        yield from ((f"{expert}{one}{suffix}", every_other_row(tensor, i)) for i, one in enumerate(("gate", "up")))


def each_expert(stacked: Tensor, spec: ModelSpec) -> Iterator[Tensor]:
    count = spec.experts.count if spec.experts else 0
    if stacked.shape[0] != count or len(stacked.shape) < 2:
        raise MalformedFile(f"tensor {stacked.name!r} has shape {stacked.shape}; the config says {count} experts")
    _, rows, *width = stacked.shape
    if not width and stacked.format.values > 1:
        raise UnsupportedModel(
            f"tensor {stacked.name!r} holds biases in {stacked.format.name}; they must be plain numbers"
        )
    flat = replace(stacked, shape=(count * rows, *width))
    for i in range(count):
        yield some_rows(flat, i * rows, (i + 1) * rows)


def split(tensor: Tensor, parts: Mapping[str, int], dims: int, groups: int = 1) -> Iterator[tuple[str, Tensor]]:
    """Yields the named parts of a tensor of `dims` dimensions; `parts` gives their row counts. With several groups,
    each group of rows holds its share of every part.
    """
    total = sum(parts.values())
    if len(tensor.shape) != dims or tensor.shape[0] != total or prod(tensor.shape[1:]) % tensor.format.values:
        raise MalformedFile(f"tensor {tensor.name!r} has shape {tensor.shape}; the model's config needs {total} rows")
    ends = pairwise(accumulate((size // groups for size in parts.values()), initial=0))
    for part, (first, last) in zip(parts, ends, strict=True):
        yield part, some_rows(tensor, first, last) if groups == 1 else rows_of_groups(tensor, groups, first, last)
