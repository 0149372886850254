"""Tensors that hold several weights one after the other are taken apart: the parts are views of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise

from penstock.errors import MalformedFile
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor, some_rows

FUSED = re.compile(r"(layers\.\d+\.)(qkv|gate_up)")


def split_fused(tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """By canonical names, all of them."""
    parts = {
        "qkv": {"q": spec.attn.q_width, "k": spec.attn.kv_width, "v": spec.attn.kv_width},
        "gate_up": {"gate": spec.hidden, "up": spec.hidden},
    }
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if match := FUSED.fullmatch(name):
            found |= {match[1] + part: rows for part, rows in split(tensor, parts[match[2]])}
        else:
            found[name] = tensor
    return found


def split(tensor: Tensor, parts: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    total = sum(parts.values())
    if len(tensor.shape) != 2 or tensor.shape[0] != total:
        raise MalformedFile(f"tensor {tensor.name!r} has shape {tensor.shape}; the model's config needs {total} rows")
    ends = pairwise(accumulate(parts.values(), initial=0))
    return ((part, some_rows(tensor, first, last)) for part, (first, last) in zip(parts, ends, strict=True))
