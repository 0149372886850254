"""Small random models in every format, with weights of a size that real ones have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from penstock.backend.ref.cases import attention
from penstock.model.dequantize import dequantize, layout_of
from penstock.model.families.llama import build
from penstock.model.names import LAYER
from penstock.model.packer import Packer
from penstock.model.random_tensor import random_tensor
from penstock.model.roles import role_of
from penstock.model.spec import ModelSpec
from penstock.model.tensor import FORMATS, Tensor

SMALL = ModelSpec("llama", 1, 64, 64, 40, 512, 1e-5, attention(4, 2, 16, interleaved=False))
LARGE_HEADS = ModelSpec("llama", 1, 64, 64, 40, 512, 1e-5, attention(4, 2, 32, interleaved=False))  # for KV of 4 bits
WIDE = ModelSpec("llama", 1, 256, 256, 40, 512, 1e-5, attention(4, 1, 64, interleaved=False))  # for K-quants
MINIMA = {"Q4_1": -7.5, "Q4_K": 7.5, "Q5_K": 15.5}  # over scales: what makes the mean 0


def spec_for(format: str) -> ModelSpec:
    return WIDE if format.endswith("_K") else SMALL


def load_small(backend: Any, format: str, seed: int = 0, program: int = 0, spec: ModelSpec | None = None) -> Any:
    """The same model for every backend."""
    spec = spec or spec_for(format)
    rng = np.random.default_rng(seed)
    backend.load(build(spec, Packer(tensors(rng, spec, format), backend)), program)
    return backend


def tensors(rng: np.random.Generator, spec: ModelSpec, format: str) -> dict[str, Tensor]:
    a = spec.attn
    shapes = {"embed": (spec.vocab, spec.dim), "head": (spec.vocab, spec.dim)}
    vectors = ["norm"]
    for i in range(spec.layers):
        shapes |= {f"layers.{i}.{name}": (rows, spec.dim) for name, rows in (("q", a.q_width), ("gate", spec.hidden))}
        shapes |= {f"layers.{i}.{name}": (a.kv_width, spec.dim) for name in ("k", "v")}
        shapes |= {f"layers.{i}.up": (spec.hidden, spec.dim), f"layers.{i}.o": (spec.dim, a.q_width)}
        shapes[f"layers.{i}.down"] = (spec.dim, spec.hidden)
        vectors += [f"layers.{i}.attn_norm", f"layers.{i}.mlp_norm"]
    found = {name: matrix(rng, format, *shape) for name, shape in shapes.items()}
    found |= {name: vector(rng, spec.dim) for name in vectors}
    return {name: replace(tensor, role=role_of(LAYER.sub("", name))) for name, tensor in found.items()}


def vector(rng: np.random.Generator, size: int) -> Tensor:
    return Tensor("gains", FORMATS["F32"], (size,), rng.normal(1, 0.1, size).astype(np.float32).view(np.uint8))


def matrix(rng: np.random.Generator, format: str, rows: int, width: int) -> Tensor:
    """Values that keep what they multiply as large as it was."""
    tensor = random_tensor(rng, format, rows, width)
    blocks, wanted = tensor.data.view(layout_of(format)), width**-0.5
    if format == "F32":
        blocks["x"] *= wanted
        return tensor
    blocks["d"] = 1
    if format in MINIMA:
        blocks["m"] = MINIMA[format]
    scale = wanted / dequantize(tensor).std()
    blocks["d"] = scale
    if format in MINIMA:
        blocks["m"] = MINIMA[format] * scale
    return tensor
