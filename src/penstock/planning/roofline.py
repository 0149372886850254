"""Forecasts the time of steps from a model's arithmetic and the measured speed of the machine (calibration.py).

A matrix product reads its weights and multiplies them. For few rows the reading takes the time, for many rows the
multiplying, and in between kernels differ. So products are measured for several numbers of rows, and the times between
are interpolated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from penstock.backend.base import StoredAs
from penstock.model.roles import EXPERTS, Role
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

AROUND_LAYERS = (Role.PER_LAYER_IN, Role.STREAM_PROJECTION)  # matrices of no layer that every token is multiplied by


class MatmulTimes(NamedTuple):
    """Holds the measured times of products with weights of one format."""

    rows: tuple[int, ...]  # rising, from 1
    seconds: tuple[float, ...]  # per step and weight, for each of `rows`

    def time(self, rows: float) -> float:
        """Returns the seconds per weight for a number of rows. Beyond the measured numbers they grow in proportion."""
        if rows > self.rows[-1]:
            return rows / self.rows[-1] * self.seconds[-1]
        return float(np.interp(rows, self.rows, self.seconds))


class MachineProfile(NamedTuple):
    """Holds the measured speed of a machine."""

    step: float  # seconds of the host for each step, while the device computes: no step takes less
    layer: float  # seconds of any layer, independent of its size
    cache: float  # bytes of the KV cache read per second while decoding
    scores: float  # multiply-adds per second in the attention of prompts
    matmuls: Mapping[str, MatmulTimes]  # keys: stored formats
    busy: float = 0.0  # share of the machine that other processes used while it was measured


class WeightGroup(NamedTuple):
    """Counts weights that have the same format and are used by the same rows."""

    kind: str  # format
    weights: int
    share: float = 1.0  # used by one row; below 1 for experts
    sampled: bool = False  # used only for rows whose logits are needed


class ModelCosts(NamedTuple):
    """Counts what one step of a model computes and reads."""

    weight_groups: tuple[WeightGroup, ...]
    kv_token: int  # bytes that all layers together read of one token
    windows: tuple[int, ...]  # one per attention layer; 0: the whole context
    q_width: int  # average of layers
    causal: bool = True
    recurrent: int = 0  # layers with a state instead of KV
    state: int = 0  # bytes of all those layers; each token of a row reads and writes them

    @property
    def layers(self) -> int:
        return len(self.windows) + self.recurrent

    @property
    def kinds(self) -> list[str]:
        return sorted({group.kind for group in self.weight_groups})


def model_costs(
    spec: ModelSpec, tensors: Mapping[str, Tensor], stored_as: Callable[[Tensor], StoredAs], kv_token: int
) -> ModelCosts:
    sums: Counter[tuple[str, float, bool]] = Counter()
    for name, share, sampled in used_matrices(spec, tensors):
        sums[stored_as(tensors[name]).kind, share, sampled] += prod(tensors[name].shape)
    groups = tuple(WeightGroup(kind, count, share, sampled) for (kind, share, sampled), count in sums.items())
    layers = [spec.attention(layer) for layer in spec.attention_layers]
    written = sum(attn.kv_values for attn in spec.cached_attention)
    read = kv_token * sum(attn.kv_values for attn in layers) // written if written else 0
    q_width = sum(attn.q_width for attn in layers) // max(len(layers), 1)
    windows, states = tuple(attn.window for attn in layers), (len(spec.recurrent), spec.state_bytes)
    return ModelCosts(groups, read, windows, q_width, spec.attn.causal, *states)


def used_matrices(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, float, bool]]:
    """Yields the name of each matrix that steps multiply with, the share of it that a row uses, and whether only
    sampled rows do."""
    head = "embed" if spec.tied else "head"
    needed = spec.experts.top_k / spec.experts.count if spec.experts else 1.0
    for name, tensor in tensors.items():
        between = name.startswith("layers.") or tensor.role in AROUND_LAYERS
        if len(tensor.shape) == 2 and (between or name == head):
            yield name, needed if tensor.role in EXPERTS else 1.0, name == head


def matmul_time(profile: MachineProfile, costs: ModelCosts, tokens: int, sampled: int) -> float:
    return sum(
        group_time(profile.matmuls[group.kind], group, sampled if group.sampled else tokens)
        for group in costs.weight_groups
    )


def group_time(times: MatmulTimes, group: WeightGroup, rows: int) -> float:
    if not rows:
        return 0.0
    needed = 1 - (1 - group.share) ** rows  # share of the weights that at least one row uses
    return needed * group.weights * times.time(rows * group.share / needed)


def decode_time(profile: MachineProfile, costs: ModelCosts, rows: int, context: int) -> float:
    seen = sum(min(context, window or context) for window in costs.windows) / max(len(costs.windows), 1)
    cache = rows * (seen * costs.kv_token + 2 * costs.state) / profile.cache
    return max(profile.step, costs.layers * profile.layer + matmul_time(profile, costs, rows, rows) + cache)


def prefill_time(profile: MachineProfile, costs: ModelCosts, tokens: int, step_tokens: int) -> float:
    """Returns the seconds to the first token of an answer, in steps of at most `step_tokens`, when nothing else
    runs."""
    steps = [min(step_tokens, tokens - first) for first in range(0, tokens, step_tokens)]
    products = sum(matmul_time(profile, costs, step, int(i == len(steps) - 1)) for i, step in enumerate(steps))
    pairs = sum(attention_pairs(tokens, window) if costs.causal else tokens**2 for window in costs.windows)
    fixed = profile.step + len(steps) * costs.layers * profile.layer
    state_values = 3 * tokens * costs.state / 4  # each value is read to predict, written, and read for the output
    return fixed + products + (2 * costs.q_width * pairs + state_values) / profile.scores


def attention_pairs(tokens: int, window: int) -> float:
    """Returns how many pairs of positions attend when each sees itself and the `window` before it; 0: all before it."""
    if not window or window >= tokens:
        return tokens * (tokens + 1) / 2
    return window * (window + 1) / 2 + (tokens - window) * window
