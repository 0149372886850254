"""Tensors that hold several weights one after the other are taken apart: the parts are views of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from math import prod

from penstock.errors import MalformedFile
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor, some_rows

FUSED = re.compile(r"(layers\.\d+\.)(qkv|gate_up)(\.bias)?")


def split_fused(tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """By canonical names, all of them."""
    parts = {
        "qkv": {"q": spec.attn.q_width, "k": spec.attn.kv_width, "v": spec.attn.kv_width},
        "gate_up": {"gate": spec.hidden, "up": spec.hidden},
    }
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if match := FUSED.fullmatch(name):
            role = match[3] or ""
            pieces = split(tensor, parts[match[2]], dims=1 if role else 2)
            found |= {match[1] + part + role: piece for part, piece in pieces}
        else:
            found[name] = tensor
    return found


def split(tensor: Tensor, parts: Mapping[str, int], dims: int) -> Iterator[tuple[str, Tensor]]:
    total = sum(parts.values())
    if len(tensor.shape) != dims or tensor.shape[0] != total or prod(tensor.shape[1:]) % tensor.format.values:
        raise MalformedFile(f"tensor {tensor.name!r} has shape {tensor.shape}; the model's config needs {total} rows")
    ends = pairwise(accumulate(parts.values(), initial=0))
    return ((part, some_rows(tensor, first, last)) for part, (first, last) in zip(parts, ends, strict=True))
