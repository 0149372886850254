"""Measures what a machine gives (roofline.py), through the same seam that the engine computes through.

Small models with random weights are loaded one after the other. What differs between two of them, or between two steps
of one, is what a layer, a byte of weights, a multiply-add or a byte of cache costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil, prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.backend import open_backend
from penstock.backend.base import Backend, Batch
from penstock.backend.batches import Chunk, greedy_batch
from penstock.config import Config, Device
from penstock.model import rope
from penstock.model.load import Checkpoint, load_model
from penstock.model.random_tensor import random_tensor
from penstock.model.spec import AttentionSpec, ModelSpec, RopeSpec
from penstock.model.tensor import FORMATS
from penstock.planning.roofline import Machine, Roof

Tell = Callable[[str], None]
BLOCK = 16
SHORT, LONG = 64, 1984  # contexts
ROWS = 8  # that attend to them
TIMES = 7  # each step is taken: the fastest is what the machine gives, others were disturbed


class Shape(NamedTuple):
    """Of a probe's layers."""

    dim: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


class Sizes(NamedTuple):
    """What suits a device: matrices as models for it have them, and more bytes of them than its caches hold."""

    large: Shape
    small: Shape  # nothing but what every layer costs
    bytes: int
    tokens: int  # of a prompt
    rows: tuple[int, ...]  # that answer at once


SIZES = {
    "cpu": Sizes(Shape(1024, 2816, 16, 4, 64), Shape(64, 64, 1, 1, 64), 160 << 20, 256, (1, 8, 32)),
    "cuda": Sizes(Shape(4096, 14336, 32, 8, 128), Shape(256, 256, 2, 1, 128), 1 << 30, 2048, (1, 8, 32, 128)),
}


def measure(config: Config, kinds: Iterable[str], known: Machine | None = None, tell: Tell = lambda _: None) -> Machine:
    """Measures products with weights of these kinds (`StoredAs`), for a config with all defaults filled in, and adds
    them to what is known already."""
    config = replace(config, quantize="")
    sizes = SIZES[Device.parse(config.device).kind]
    if known is None:
        tell("steps and layers")
        step, layer = fixed_costs(config, sizes)
        tell("attention")
        known = Machine(step, layer, *attention_rates(config, sizes), roofs={})
    roofs = dict(known.roofs)
    for kind in kinds:
        tell(f"products with {kind}")
        roofs[kind] = roof_of(config, sizes, kind, known)
    return known._replace(roofs=roofs)


def fixed_costs(config: Config, sizes: Sizes) -> tuple[float, float]:
    """Seconds of the host for a step, and of a layer."""
    few, many = 2, 34
    with opened(config, sizes.small, "F16", few) as backend:
        step, short = host_time(backend), backend.time_step(one_token(1), TIMES)
    with opened(config, sizes.small, "F16", many) as backend:
        return step, max(backend.time_step(one_token(1), TIMES) - short, 0.0) / (many - few)


def attention_rates(config: Config, sizes: Sizes) -> tuple[float, float]:
    """Bytes of the cache for one row, multiply-adds for a prompt."""
    layers, shape = 4, sizes.large._replace(dim=256, hidden=256)
    with opened(config, shape, "F16", layers) as backend:
        near, far = (backend.time_step(one_token(at, ROWS), TIMES) for at in (SHORT, LONG))
        prompt, far_prompt = (backend.time_step(prompt_of(sizes.tokens, at), 3) for at in (SHORT, LONG))
        kv_token = backend.memory_needs().kv_bytes_per_token
    more = LONG - SHORT
    return (
        ROWS * more * kv_token / above_zero(far - near),
        2 * more * sizes.tokens * shape.heads * shape.head_dim * layers / above_zero(far_prompt - prompt),
    )


def roof_of(config: Config, sizes: Sizes, kind: str, machine: Machine) -> Roof:
    shape, format = sizes.large, kind
    if kind not in FORMATS:
        config, format = replace(config, quantize=kind), "BF16"
    values = sum(prod(size) for size in matrices(shape).values())
    size = values * FORMATS[format].bytes / FORMATS[format].values
    layers = max(ceil(sizes.bytes / size), 2)
    scores = sizes.tokens**2 * shape.heads * shape.head_dim * layers / machine.scores
    with opened(config, shape, format, layers) as backend:
        times = [backend.time_step(one_token(1, rows), TIMES) for rows in sizes.rows]
        times.append(backend.time_step(prompt_of(sizes.tokens), 3) - scores)
    fixed = layers * machine.layer
    return Roof((*sizes.rows, sizes.tokens), tuple(above_zero(time - fixed) / (layers * values) for time in times))


def above_zero(seconds: float) -> float:
    """Two steps that should differ may not on a machine that others use."""
    return max(seconds, 1e-9)


@contextmanager
def opened(config: Config, shape: Shape, format: str, layers: int) -> Iterator[Backend]:
    """With such a model."""
    backend = open_backend(config)
    backend.load(load_model(random_model(shape, format, layers), backend))
    backend.reserve_kv(ROWS * (LONG // BLOCK + 1) + SIZES[Device.parse(config.device).kind].tokens // BLOCK, BLOCK)
    backend.warm_up()
    try:
        yield backend
    finally:
        backend.close()


def random_model(shape: Shape, format: str, layers: int) -> Checkpoint:
    """All layers have the same weights: each is packed by itself, and none is read twice in a step."""
    rng = np.random.default_rng(0)
    vocab, freqs = 64, rope.plain(10000.0, shape.head_dim)
    spec = ModelSpec(
        arch="llama",
        layers=layers,
        dim=shape.dim,
        hidden=shape.hidden,
        vocab=vocab,
        max_len=LONG + max(sizes.tokens for sizes in SIZES.values()),
        eps=1e-5,
        attn=AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, RopeSpec(freqs, interleaved=False)),
        tied=True,
    )
    layer = {name: random_tensor(rng, format, *size) for name, size in matrices(shape).items()}
    layer |= {name: random_tensor(rng, "F32", shape.dim) for name in ("attn_norm", "mlp_norm")}
    tensors = {f"layers.{i}.{name}": tensor for i in range(layers) for name, tensor in layer.items()}
    tensors["embed"] = random_tensor(rng, "F16", vocab, shape.dim)
    tensors["norm"] = random_tensor(rng, "F32", shape.dim)
    return Checkpoint(spec, tensors, name="probe", path=Path(), metadata={})


def matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q": (q, shape.dim),
        "k": (kv, shape.dim),
        "v": (kv, shape.dim),
        "o": (shape.dim, q),
        "gate": (shape.hidden, shape.dim),
        "up": (shape.hidden, shape.dim),
        "down": (shape.dim, shape.hidden),
    }


def one_token(at: int, rows: int = 1) -> Batch:
    """Of each row, whose context is its own."""
    blocks = at // BLOCK + 1
    return greedy_batch([Chunk([1], at, range(row * blocks, (row + 1) * blocks), row, 1) for row in range(rows)])


def prompt_of(tokens: int, at: int = 0) -> Batch:
    return greedy_batch([Chunk([1] * tokens, at, range((at + tokens) // BLOCK + 1), sample=1)])


def host_time(backend: Backend, count: int = 32) -> float:
    """Seconds between steps of hardly any work, queued as the engine does."""
    backend.time_step(one_token(1), 1)
    begun = time.perf_counter()
    for step in range(count):
        backend.launch(replace(one_token(1), step=step))
        if step >= backend.depth:
            backend.wait(step - backend.depth)
    for step in range(count - backend.depth, count):
        backend.wait(step)
    return (time.perf_counter() - begun) / count
