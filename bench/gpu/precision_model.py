"""The model of `precision.py`: a file's values in float32, their truth, and the same model shuffled and filled up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from requantize import requantized
from torch.nn import functional

from penstock.model.dequantize import dequantize
from penstock.model.load import open_checkpoint
from penstock.model.spec import ModelSpec, RopeSpec
from penstock.model.tensor import FORMATS, Tensor

Array = Any  # a torch tensor
ROW = 256  # a multiple of which rows are as long as


@dataclass(frozen=True, slots=True)
class Values:
    """A tied model of the Llama family without biases, by canonical names."""

    spec: ModelSpec
    arrays: dict[str, Array]  # float32


def read(path: Path, device: str) -> Values:
    checkpoint = open_checkpoint(path)
    if not checkpoint.spec.tied or any(name.endswith(".bias") for name in checkpoint.tensors):
        raise SystemExit(f"{path} is not a tied model without biases")
    arrays = {name: torch.from_numpy(dequantize(t).copy()).to(device) for name, t in checkpoint.tensors.items()}
    return Values(checkpoint.spec, arrays)


# ---- the truth ----


def truth(model: Values, tokens: Array) -> Array:
    """Log-probabilities after each token of a window [T] -> [T, vocab], in float32 without shortcuts."""
    s, a = model.spec, model.arrays
    x = a["embed"][tokens]
    for i in range(s.layers):
        w = {
            name: a[f"layers.{i}.{name}"]
            for name in ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")
        }
        y = norm(x, w["attn_norm"], s.eps)
        x = x + attention(y @ w["q"].T, y @ w["k"].T, y @ w["v"].T, s) @ w["o"].T
        y = norm(x, w["mlp_norm"], s.eps)
        x = x + (functional.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
    return torch.log_softmax(norm(x, a["norm"], s.eps) @ a["embed"].T, -1)


def norm(x: Array, gain: Array, eps: float) -> Array:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def attention(q: Array, k: Array, v: Array, spec: ModelSpec) -> Array:
    a = spec.attn
    q, k, v = (x.unflatten(-1, (-1, a.head_dim)).transpose(0, 1) for x in (q, k, v))  # [heads, T, D]
    q, k = turned(q, a.rope), turned(k, a.rope)
    k, v = (x.repeat_interleave(a.heads // a.kv_heads, 0) for x in (k, v))
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(1, 2) * a.scale).masked_fill(hidden, -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(0, 1).flatten(1)


def turned(x: Array, rope: RopeSpec) -> Array:
    frequencies = torch.tensor(rope.inv_freq, dtype=torch.float64, device=x.device)
    angles = torch.arange(x.shape[1], device=x.device)[:, None] * frequencies
    cos, sin = (f(angles).float() * rope.scale for f in (torch.cos, torch.sin))
    left, right = (x[..., ::2], x[..., 1::2]) if rope.interleaved else x.chunk(2, -1)
    pair = (left * cos - right * sin, right * cos + left * sin)
    return torch.stack(pair, -1).flatten(-2) if rope.interleaved else torch.cat(pair, -1)


# ---- shuffled and filled up ----


def filled(size: int) -> int:
    return -(-size // ROW) * ROW


def pad(values: Array, *sizes: int) -> Array:
    out = values.new_zeros(sizes)
    out[tuple(slice(size) for size in values.shape)] = values
    return out


def shuffled(model: Values) -> Values:
    """The same answers from rows that are multiples of 256 long, their columns in another order."""
    s, a = model.spec, model.spec.attn
    dim, hidden, shared = filled(s.dim), filled(s.hidden), a.heads // a.kv_heads
    groups = next(n for n in range(a.kv_heads, 10_000) if n * shared * a.head_dim % ROW == 0)
    random = torch.Generator().manual_seed(0)
    mix = lambda size: torch.randperm(size, generator=random).to(model.arrays["embed"].device)  # noqa: E731
    order = mix(s.dim)
    found = {
        "embed": pad(model.arrays["embed"][:, order], s.vocab, dim),
        "norm": pad(model.arrays["norm"][order], dim) * sqrt(s.dim / dim),
    }
    for i in range(s.layers):
        w = {name: model.arrays[f"layers.{i}.{name}"] for name in ("q", "k", "v", "o", "gate", "up", "down")}
        inner, within = mix(s.hidden), [mix(a.head_dim) for _ in range(a.kv_heads)]
        rows = torch.cat([order_of_head + a.head_dim * g for g, order_of_head in enumerate(within)])
        columns = torch.cat([within[h // shared] + a.head_dim * h for h in range(a.heads)])
        layer = {
            "q": pad(w["q"][:, order], groups * shared * a.head_dim, dim),
            "k": pad(w["k"][:, order], groups * a.head_dim, dim),
            "v": pad(w["v"][rows][:, order], groups * a.head_dim, dim),
            "o": pad(w["o"][order][:, columns], dim, groups * shared * a.head_dim),
            "gate": pad(w["gate"][inner][:, order], hidden, dim),
            "up": pad(w["up"][inner][:, order], hidden, dim),
            "down": pad(w["down"][order][:, inner], dim, hidden),
        }
        for name in ("attn_norm", "mlp_norm"):
            layer[name] = pad(model.arrays[f"layers.{i}.{name}"][order], dim) * sqrt(s.dim / dim)
        found |= {f"layers.{i}.{name}": values for name, values in layer.items()}
    attn = replace(a, heads=groups * shared, kv_heads=groups)
    return Values(replace(s, dim=dim, hidden=hidden, eps=s.eps * s.dim / dim, attn=attn), found)


def tensors(model: Values, format: str) -> dict[str, Tensor]:
    """As a checkpoint would have them: vectors in F32, matrices in one format."""
    return {name: tensor(name, values, format) for name, values in model.arrays.items()}


def tensor(name: str, values: Array, format: str) -> Tensor:
    if values.ndim == 1:
        data = values.view(torch.uint8)
        format = "F32"
    elif format == "BF16":
        data = values.bfloat16().view(torch.uint8)
    else:
        data = requantized(values, format)
    return Tensor(name, FORMATS[format], tuple(values.shape), np.ascontiguousarray(data.flatten().cpu().numpy()))
