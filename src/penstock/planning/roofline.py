"""How long steps will take: what a model asks of a machine over what that machine was measured to give (probe.py).

A product reads its weights and multiplies them: for a few rows the reading takes its time, for many the multiplying,
and between them kernels differ. So products are measured for some numbers of rows; others lie between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from penstock.backend.base import StoredAs
from penstock.model.roles import EXPERTS
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor


class Roof(NamedTuple):
    """Gives the speed of products with weights that are stored alike."""

    rows: tuple[int, ...]  # 1 and more
    seconds: tuple[float, ...]  # of a step with so many rows, for each weight

    def time(self, rows: float) -> float:
        """Beyond what was measured it grows as rows do."""
        if rows > self.rows[-1]:
            return rows / self.rows[-1] * self.seconds[-1]
        return float(np.interp(rows, self.rows, self.seconds))


class Machine(NamedTuple):
    """What was measured. Rates are of a second."""

    step: float  # seconds of the host for each step, while the device computes: no step takes less
    layer: float  # seconds that every layer takes, whatever its size
    cache: float  # bytes of the KV cache, read for one row
    scores: float  # multiply-adds of prompts' attention
    roofs: Mapping[str, Roof]  # by what weights are stored as


class Load(NamedTuple):
    """Counts weights that are stored and used alike."""

    kind: str
    weights: int
    share: float = 1.0  # of them that one row needs: experts
    sampled: bool = False  # for rows whose logits are wanted, not for every token


class Demand(NamedTuple):
    """What a model asks for."""

    loads: tuple[Load, ...]
    kv_token: int
    windows: tuple[int, ...]  # of each layer that attends; 0: none
    q_width: int
    causal: bool = True
    recurrent: int = 0  # layers that have a state instead
    state: int = 0  # bytes, of all of them: each token of a row reads and writes it

    @property
    def layers(self) -> int:
        return len(self.windows) + self.recurrent

    @property
    def kinds(self) -> list[str]:
        return sorted({load.kind for load in self.loads})


def demand_of(
    spec: ModelSpec, tensors: Mapping[str, Tensor], stored_as: Callable[[Tensor], StoredAs], kv_token: int
) -> Demand:
    """`tensors` by canonical name."""
    sums: Counter[tuple[str, float, bool]] = Counter()
    for name, share, sampled in used(spec, tensors):
        sums[stored_as(tensors[name]).kind, share, sampled] += prod(tensors[name].shape)
    loads = tuple(Load(kind, count, share, sampled) for (kind, share, sampled), count in sums.items())
    windows = tuple(spec.attention(layer).window for layer in range(spec.layers) if layer not in spec.recurrent)
    states = len(spec.recurrent), spec.state_bytes
    return Demand(loads, kv_token, windows, spec.attn.q_width, spec.attn.causal, *states)


def used(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, float, bool]]:
    """Names of the matrices that are multiplied with, the share of rows that need each, whether only sampled ones."""
    head = "embed" if spec.tied else "head"
    needed = spec.experts.top_k / spec.experts.count if spec.experts else 1.0
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and (name.startswith("layers.") or name == head):
            yield name, needed if tensor.role in EXPERTS else 1.0, name == head


def products_time(machine: Machine, demand: Demand, tokens: int, sampled: int) -> float:
    """Of a step with so many tokens."""
    return sum(load_time(machine.roofs[load.kind], load, sampled if load.sampled else tokens) for load in demand.loads)


def load_time(roof: Roof, load: Load, rows: int) -> float:
    if not rows:
        return 0.0
    needed = 1 - (1 - load.share) ** rows  # of the weights: at least one of the rows needs them
    return needed * load.weights * roof.time(rows * load.share / needed)


def decode_time(machine: Machine, demand: Demand, rows: int, context: int) -> float:
    """Of one step that gives every row a token, where each has so much before it."""
    seen = sum(min(context, window or context) for window in demand.windows) / max(len(demand.windows), 1)
    cache = rows * (seen * demand.kv_token + 2 * demand.state) / machine.cache
    return max(machine.step, demand.layers * machine.layer + products_time(machine, demand, rows, rows) + cache)


def prefill_time(machine: Machine, demand: Demand, tokens: int, longest: int) -> float:
    """To the first token of an answer, where steps have at most `longest` tokens and nothing else is to be done."""
    steps = [min(longest, tokens - first) for first in range(0, tokens, longest)]
    products = sum(products_time(machine, demand, step, int(i == len(steps) - 1)) for i, step in enumerate(steps))
    pairs = sum(pairs_seen(tokens, window) if demand.causal else tokens**2 for window in demand.windows)
    fixed = machine.step + len(steps) * demand.layers * machine.layer
    remembered = 3 * tokens * demand.state / 4  # each value is read for what is known, written, and read
    return fixed + products + (2 * demand.q_width * pairs + remembered) / machine.scores


def pairs_seen(tokens: int, window: int) -> float:
    """Of positions, where each sees those before it and itself."""
    if not window or window >= tokens:
        return tokens * (tokens + 1) / 2
    return window * (window + 1) / 2 + (tokens - window) * window
