"""Measures the speed of this machine (roofline.py) through the backend that the engine uses.

Small models with random weights are loaded one after the other. The difference between two of them, or between two
steps of one, is the cost of a layer, a weight, a multiply-add or a byte of KV cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil, prod
from pathlib import Path

import numpy as np

from penstock.backend import open_backend
from penstock.backend.base import Backend, Batch
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.device import Calibration, LayerShape
from penstock.backend.devices import device_kind
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.model import rope
from penstock.model.formats.trellis import NAME as EXL3
from penstock.model.formats.trellis import trellis_bits
from penstock.model.load import Checkpoint, load_model
from penstock.model.random_tensor import random_tensor
from penstock.model.spec import AttentionSpec, ModelSpec, RopeSpec
from penstock.model.tensor import STORAGE
from penstock.planning.roofline import MachineProfile, MatmulTimes

Log = Callable[[str], None]
BLOCK = 16
SHORT, LONG = 64, 1984  # tokens of context
ROWS = 8  # sequences with either context
TIMES = 7  # runs of each step; the fastest counts


def measure(
    config: Config, kinds: Iterable[str], known: MachineProfile | None = None, log: Log = lambda _: None
) -> MachineProfile:
    """Adds the machine's speed with weights of these formats (`StoredAs.kind`) to the `known` profile.
    The config has its defaults filled in."""
    config = replace(config, quantize="")
    sizes = calibration_of(config)
    if known is None:
        log("steps and layers")
        step, layer = fixed_costs(config, sizes)
        log("attention")
        known = MachineProfile(step, layer, *attention_rates(config, sizes), matmuls={})
    matmuls = dict(known.matmuls)
    for kind in kinds:
        log(f"products with {kind}")
        matmuls[kind] = matmul_times(config, sizes, kind, known)
    return known._replace(matmuls=matmuls)


def calibration_of(config: Config) -> Calibration:
    sizes = device_kind(config.device).calibration
    if sizes is None:
        raise ConfigError(f"the speed of device {config.device} is not measured")
    return sizes


def fixed_costs(config: Config, sizes: Calibration) -> tuple[float, float]:
    few, many = 2, 34
    with opened(config, sizes.small, "F16", few) as backend:
        step, short = host_time(backend), backend.time_step(one_token(1), TIMES)
    with opened(config, sizes.small, "F16", many) as backend:
        return step, max(backend.time_step(one_token(1), TIMES) - short, 0.0) / (many - few)


def attention_rates(config: Config, sizes: Calibration) -> tuple[float, float]:
    """Returns per second: bytes of KV cache read in decode, and multiply-adds of attention in prefill."""
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


def matmul_times(config: Config, sizes: Calibration, kind: str, profile: MachineProfile) -> MatmulTimes:
    shape, format = sizes.large, kind
    if kind not in STORAGE and not kind.startswith(EXL3):
        config, format = replace(config, quantize=kind), "BF16"
    values = sum(prod(size) for size in matrices(shape).values())
    size = values * bits_of(format) / 8
    layers = max(ceil(sizes.bytes / size), 2)
    scores = sizes.tokens**2 * shape.heads * shape.head_dim * layers / profile.scores
    with opened(config, shape, format, layers) as backend:
        times = [backend.time_step(one_token(1, rows), TIMES) for rows in sizes.rows]
        times.append(backend.time_step(prompt_of(sizes.tokens), 3) - scores)
    fixed = layers * profile.layer
    return MatmulTimes(
        (*sizes.rows, sizes.tokens), tuple(above_zero(time - fixed) / (layers * values) for time in times)
    )


def bits_of(format: str) -> float:
    return STORAGE[format].bytes * 8 / STORAGE[format].values if format in STORAGE else trellis_bits(format)


def above_zero(seconds: float) -> float:
    """Returns a difference of times, or a little more than 0: on a busy machine it may come out negative."""
    return max(seconds, 1e-9)


@contextmanager
def opened(config: Config, shape: LayerShape, format: str, layers: int) -> Iterator[Backend]:
    backend, tokens = open_backend(config), calibration_of(config).tokens
    backend.load(load_model(random_model(shape, format, layers, tokens), backend))
    backend.reserve_kv(ROWS * (LONG // BLOCK + 1) + tokens // BLOCK, BLOCK)
    backend.warm_up()
    try:
        yield backend
    finally:
        backend.close()


def random_model(shape: LayerShape, format: str, layers: int, tokens: int) -> Checkpoint:
    """Returns a model with room for a prompt of `tokens` tokens. Its layers have equal weights, but each is packed
    separately, so no weight is read twice in a step."""
    rng = np.random.default_rng(0)
    vocab, freqs = 64, rope.plain(10000.0, shape.head_dim)
    spec = ModelSpec(
        arch="llama",
        layers=layers,
        dim=shape.dim,
        hidden=shape.hidden,
        vocab=vocab,
        max_len=LONG + tokens,
        eps=1e-5,
        attn=AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, RopeSpec(freqs, interleaved=False)),
        tied=True,
    )
    layer = {name: random_tensor(rng, format, *size) for name, size in matrices(shape).items()}
    layer |= {name: random_tensor(rng, "F32", shape.dim) for name in ("attn_norm", "mlp_norm")}
    tensors = {f"layers.{i}.{name}": tensor for i in range(layers) for name, tensor in layer.items()}
    tensors["embed"] = random_tensor(rng, "F16", vocab, shape.dim)
    tensors["norm"] = random_tensor(rng, "F32", shape.dim)
    return Checkpoint(spec, tensors, name="calibration", path=Path(), metadata={})


def matrices(shape: LayerShape) -> dict[str, tuple[int, int]]:
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
    blocks = at // BLOCK + 1
    return greedy_batch([Chunk([1], at, range(row * blocks, (row + 1) * blocks), row, 1) for row in range(rows)])


def prompt_of(tokens: int, at: int = 0) -> Batch:
    return greedy_batch([Chunk([1] * tokens, at, range((at + tokens) // BLOCK + 1), sample=1)])


def host_time(backend: Backend, count: int = 32) -> float:
    """Returns the seconds between steps with hardly any work, which are queued as the engine does."""
    backend.time_step(one_token(1), 1)
    begun = time.perf_counter()
    for step in range(count):
        backend.launch(replace(one_token(1), step=step))
        if step >= backend.depth:
            backend.wait(step - backend.depth)
    for step in range(count - backend.depth, count):
        backend.wait(step)
    return (time.perf_counter() - begun) / count
