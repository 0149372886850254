"""Tensors that hold several weights are taken apart: the parts are views of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor, every_other_row, some_rows, transposed

FUSED = re.compile(r"(layers\.\d+\.(?:experts\.\d+\.)?)(qkv|gate_up|kv_a)(\.bias)?")
BANK = re.compile(r"(layers\.\d+\.experts\.)((gate|up|gate_up|down|pairs)(?:_across)?(?:\.bias)?)")

FLAT, ONE_ROW = ".conv", ".shared.router"  # files differ in their shapes


def split_fused(tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """By canonical names, all of them."""
    parts = {
        "qkv": {"q": spec.attn.q_width, "k": spec.attn.kv_width, "v": spec.attn.kv_width},
        "gate_up": {"gate": spec.hidden, "up": spec.hidden},
        "kv_a": {"latent": spec.attn.v_dim, "turned": spec.attn.head_dim - spec.attn.v_dim},
    }
    expert_parts = dict.fromkeys(("gate", "up"), spec.experts.hidden if spec.experts else 0)
    found: dict[str, Tensor] = {}
    for name, tensor in split_banks(tensors, spec):
        if match := FUSED.fullmatch(name):
            role = match[3] or ""
            wanted = expert_parts if ".experts." in name else parts[match[2]]
            pieces = split(tensor, wanted, dims=1 if role else 2)
            found |= {match[1] + part + role: piece for part, piece in pieces}
        elif name.endswith(FLAT):
            found[name] = replace(tensor, shape=(prod(tensor.shape),))
        elif name.endswith(ONE_ROW):
            found[name] = replace(tensor, shape=(1, prod(tensor.shape)))
        else:
            found[name] = tensor
    return found


def split_banks(tensors: Mapping[str, Tensor], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """With those of all experts of a layer as one for each."""
    for name, tensor in tensors.items():
        if match := BANK.fullmatch(name):
            for i, one in enumerate(each_of(tensor, spec)):
                yield from parts_of(f"{match[1]}{i}.", match[2], one)
        else:
            yield name, tensor


def parts_of(expert: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor of one expert may lie (in, out), and hold rows of gate and up in turn."""
    part, _, role = name.partition(".")
    if part.endswith("_across"):
        tensor = transposed(tensor)
    part, role = part.removesuffix("_across"), role and f".{role}"
    if part != "pairs":
        yield f"{expert}{part}{role}", tensor
    else:
        yield from ((f"{expert}{one}{role}", every_other_row(tensor, i)) for i, one in enumerate(("gate", "up")))


def each_of(bank: Tensor, spec: ModelSpec) -> Iterator[Tensor]:
    count = spec.experts.count if spec.experts else 0
    if bank.shape[0] != count or len(bank.shape) < 2:
        raise MalformedFile(f"tensor {bank.name!r} has shape {bank.shape}; the config speaks of {count} experts")
    _, rows, *width = bank.shape
    if not width and bank.format.values > 1:
        raise UnsupportedModel(f"tensor {bank.name!r} holds biases in {bank.format.name}; they must be plain numbers")
    flat = replace(bank, shape=(count * rows, *width))
    for i in range(count):
        yield some_rows(flat, i * rows, (i + 1) * rows)


def split(tensor: Tensor, parts: Mapping[str, int], dims: int) -> Iterator[tuple[str, Tensor]]:
    total = sum(parts.values())
    if len(tensor.shape) != dims or tensor.shape[0] != total or prod(tensor.shape[1:]) % tensor.format.values:
        raise MalformedFile(f"tensor {tensor.name!r} has shape {tensor.shape}; the model's config needs {total} rows")
    ends = pairwise(accumulate(parts.values(), initial=0))
    return ((part, some_rows(tensor, first, last)) for part, (first, last) in zip(parts, ends, strict=True))
