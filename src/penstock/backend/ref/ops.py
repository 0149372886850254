"""Defines what every op means, in float32 NumPy. Faster backends are tested against it.

Symbols: T tokens in the step, S of them whose logits are wanted, C positions of context, D dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import Batch, Floats, Ints, StateMove
from penstock.backend.ref.activations import ACTS, clamped, identity, relu, sigmoid, silu
from penstock.backend.ref.adapters import LoadedAdapters, adapted
from penstock.backend.ref.delta import delta_rule
from penstock.backend.ref.hidden import RefHidden
from penstock.backend.ref.kv_cache import RefCache
from penstock.backend.ref.mamba2 import selective_scan, time_steps
from penstock.backend.ref.stream_ops import RefStreamOps, split
from penstock.model.ops import (
    ConvWeights,
    DeltaInputs,
    DeltaWeights,
    ExpertWeights,
    Mamba2Weights,
    MlaWeights,
    Precision,
    ScanWeights,
    Vectors,
)
from penstock.model.recurrence import ConvSpec, DeltaSpec, Mamba2Spec, ScanSpec
from penstock.model.spec import AttentionSpec, ExpertSpec, RopeSpec

State = tuple[Floats, ...]  # a recurrent layer's, as its spec defines it


@dataclass(frozen=True, slots=True)
class Matrix:
    weight: Floats  # [out, in]
    bias: Floats | None  # [out]


@dataclass(frozen=True, slots=True)
class RefOps(RefStreamOps):
    """Computes the ops of model/ops.py over one step, at once: a value is an array."""

    batch: Batch
    cache: RefCache
    states: list[Floats] = field(default_factory=list)  # what embeddings are pooled from
    adapters: LoadedAdapters = field(default_factory=dict)
    hidden: RefHidden = field(default_factory=RefHidden)

    def embed(self, table: Matrix, partial: bool = False) -> Floats:
        tokens = self.batch.tokens
        return table.weight[np.where(tokens < len(table.weight), tokens, 0) if partial else tokens]

    def add_norm(self, x: Floats, residual: Floats | None, gain: Floats, eps: float) -> tuple[Floats, Floats]:
        if residual is not None:
            x = x + residual
        return rms_norm(x, gain, eps), x

    def linear(self, x: Floats, weight: Matrix, precision: Precision = "activation") -> Floats:
        y = x @ weight.weight.T
        if weight.bias is not None:
            y = y + weight.bias
        return adapted(x, y, weight, self.batch, self.adapters) if len(self.batch.adapters) else y

    def norm_qk(self, qkv: Floats, q_gain: Floats, k_gain: Floats, spec: AttentionSpec, eps: float) -> Floats:
        q, k, v = np.split(qkv, [spec.q_width, spec.q_width + spec.kv_width], axis=1)
        if spec.qk_norm == "layer":
            q, k = (norm_heads(x, gain, spec.head_dim, eps) for x, gain in ((q, q_gain), (k, k_gain)))
        else:
            q, k = norm_runs(q, q_gain, eps), norm_runs(k, k_gain, eps)
        if spec.v_norm:
            v = norm_runs(v, np.ones(spec.head_dim, np.float32), eps)
        return np.concatenate([q, k, v], axis=1)

    def norm_runs(self, x: Floats, gain: Floats, eps: float) -> Floats:
        return norm_runs(x, gain, eps)

    def attend(self, layer: int, qkv: Floats, spec: AttentionSpec, vectors: Vectors) -> Floats:
        q, k, v = split_heads(qkv, spec)  # k and v have no heads where another layer wrote them
        q, k = (rotate(x, self.batch.positions, spec.rope) for x in (q, k))
        if spec.q_gain:
            q = q * vectors["q_gain"]
        if spec.temperature:
            q = q * query_scales(self.batch.positions, spec)[:, None, None]
        keys, values = self.cache.layer(layer, spec)
        out = np.zeros_like(q)
        for row, tokens in enumerate(self._row_tokens()):
            positions = self.batch.positions[tokens]
            if not spec.shares_kv:
                places = self._places(layer, row, positions)
                keys[places] = self.cache.kv.stored_keys(k[tokens])
                values[places] = self.cache.kv.stored_values(v[tokens])
            first = max(int(positions[0]) - spec.reach + 1, 0) if spec.reach and spec.causal else 0
            places = self._places(layer, row, np.arange(first, positions[-1] + 1))
            out[tokens] = attention(q[tokens], keys[places], values[places], (positions, first), spec, vectors)
        return out.reshape(len(qkv), spec.q_width)

    def act_and_mul(self, x: Floats, act: str) -> Floats:
        left, right = np.split(x, 2, axis=-1)
        return clamped(left, right) if act == "clamped" else ACTS[act](left) * right

    def add(self, x: Floats, y: Floats) -> Floats:
        return x + y

    def scale(self, x: Floats, factor: float) -> Floats:
        return x * np.float32(factor)

    def soft_cap(self, x: Floats, cap: float) -> Floats:
        return soft_capped(x, cap)

    def take_sampled(self, x: Floats) -> Floats:
        return x[self.batch.sampled]

    def pool(self, x: Floats) -> None:
        self.states.append(x)

    def add_layer_norm(
        self, x: Floats, residual: Floats | None, gain: Floats, bias: Floats, eps: float
    ) -> tuple[Floats, Floats]:
        if residual is not None:
            x = x + residual
        return layer_norm(x, gain, bias, eps), x

    def embed_positions(self, table: Matrix) -> Floats:
        return table.weight[self.batch.positions]

    def moe(self, x: Floats, router_logits: Floats, experts: ExpertWeights, spec: ExpertSpec) -> Floats:
        chosen, weights = choose(router_logits, experts.choice_bias, spec)
        if experts.scale is not None:
            weights = weights * experts.scale[chosen]
        out = np.zeros_like(x)
        for expert, (up, down) in enumerate(zip(experts.up, experts.down, strict=True)):
            rows, ranks = np.nonzero(chosen == expert)
            weight = weights[rows, ranks, None]
            given = x[rows] * weight if spec.weigh_inputs else x[rows]
            act = self.act_and_mul if spec.gated else self.activate
            y = self.linear(act(self.linear(given, up), spec.act), down)
            out[rows] += y if spec.weigh_inputs else weight * y
        return out

    def attend_mla(
        self,
        layer: int,
        q: Floats,
        kv: Floats,
        weights: MlaWeights,
        spec: AttentionSpec,
        eps: float,
        selected: Floats | None = None,
    ) -> Floats:
        rotated = spec.head_dim - spec.v_dim
        kv = np.concatenate([kv[:, :rotated], rms_norm(kv[:, rotated:], weights.gain, eps)], axis=1)
        nope, rope = np.split(split(q, q.shape[1] // spec.heads), [-rotated], axis=2)
        absorbed = np.concatenate([rope, np.einsum("tha,hba->thb", nope, weights.k_b)], axis=2)
        q, k = (rotate(x, self.batch.positions, spec.rope) for x in (absorbed, split(kv, spec.head_dim)))
        keys = self.cache.layer(layer, spec)[0]
        out = np.zeros((len(q), spec.heads, spec.v_dim), np.float32)
        for row, tokens in enumerate(self._row_tokens()):
            positions = self.batch.positions[tokens]
            keys[self._places(layer, row, positions)] = self.cache.kv.stored_mla(k[tokens], spec.v_dim)
            seen = keys[self._places(layer, row, np.arange(positions[-1] + 1))]
            out[tokens] = attention(q[tokens], seen, seen[..., rotated:], (positions, 0), spec, {})
            if selected is None:
                continue
            last = selected.shape[1] - 1
            for token in tokens.start + np.flatnonzero(positions > last):
                some = seen[selected[token].astype(np.intp)]
                out[token] = attention(q[[token]], some, some[..., rotated:], (np.array([last]), 0), spec, {})
        values: Floats = np.einsum("tha,hba->thb", out, weights.v_b)
        return values.reshape(len(q), spec.heads * weights.v_b.shape[1])

    def select_positions(self, layer: int, q: Floats, k: Floats, weights: Floats, spec: AttentionSpec) -> Floats:
        index = spec.index
        assert index is not None
        q, k = (rotate(split(x, index.head_dim), self.batch.positions, index.rope) for x in (q, k))
        keys = self.cache.layer(layer, spec)[-1]
        out = np.zeros((len(q), index.top_k), np.float32)
        for row, tokens in enumerate(self._row_tokens()):
            positions = self.batch.positions[tokens]
            keys[self._places(layer, row, positions)] = self.cache.kv.stored_keys(k[tokens])
            seen = keys[self._places(layer, row, np.arange(positions[-1] + 1))][:, 0]  # [C, D]
            scores = np.einsum("th,thc->tc", weights[tokens], relu(np.einsum("thd,cd->thc", q[tokens], seen)))
            scores[~visible(positions, 0, len(seen), spec)] = -np.inf
            selected = np.sort(highest(scores, index.top_k), axis=1)
            out[tokens, : selected.shape[1]] = selected
        return out

    def store_hidden(self, number: int, x: Floats, ahead: int = 0) -> None:
        self.hidden.store(number, x, self.batch, self.cache.hidden_group, ahead)

    def load_hidden(self, number: int, width: int) -> Floats:
        return self.hidden.load(number, width, self.batch, self.cache.hidden_group)

    def sigmoid_mul(self, x: Floats, gate: Floats) -> Floats:
        return x * sigmoid(gate)

    def delta_net(
        self, layer: int, x: DeltaInputs[Floats], weights: DeltaWeights, spec: DeltaSpec, eps: float
    ) -> Floats:
        out = np.zeros((len(x.qkv), spec.v_heads, spec.v_dim), np.float32)
        learned, alpha = sigmoid(x.beta[:, : spec.v_heads]), x.alpha[:, -spec.decay_width :]

        def step(state: State, token: int) -> State:
            last, memory = state
            last, mixed = causal_conv(last, x.qkv[token, : spec.width], weights.conv)
            memory, out[token] = delta_rule(memory, mixed, learned[token], alpha[token], weights, spec)
            return last, memory

        self._recur(layer, [(spec.conv_width - 1, spec.width), (spec.v_heads, spec.k_dim, spec.v_dim)], step)
        z = x.z[:, -spec.v_width :].reshape(out.shape)
        return (rms_norm(out, weights.gain, eps) * GATES[spec.gate](z)).reshape(-1, spec.v_width)

    def causal_conv(self, layer: int, x: Floats, weights: ConvWeights, spec: ConvSpec) -> Floats:
        out = np.zeros((len(x), spec.width), np.float32)
        b, c, u = np.split(x, 3, axis=1) if spec.gated else (None, None, x[:, : spec.width])
        inputs, act = (u, silu) if b is None else (b * u, identity)

        def step(state: State, token: int) -> State:
            last, out[token] = causal_conv(state[0], inputs[token], weights.conv, weights.bias, act)
            return (last,)

        self._recur(layer, [(spec.conv_width - 1, spec.width)], step)
        return out if c is None else c * out

    def selective_scan(
        self,
        layer: int,
        x: Floats,
        dt: Floats,
        b: Floats,
        c: Floats,
        gate: Floats,
        weights: ScanWeights,
        spec: ScanSpec,
    ) -> Floats:
        out = np.zeros_like(x)
        decay = weights.decay.reshape(spec.width, spec.state_size)
        steps = np.logaddexp(np.float32(0), dt)

        def step(state: State, token: int) -> State:
            h, now = state[0], steps[token][:, None]
            h = h * np.exp(decay * now) + now * x[token][:, None] * b[token]
            out[token] = h @ c[token]
            return (h,)

        self._recur(layer, [(spec.width, spec.state_size)], step)
        gated: Floats = (out + weights.skip * x) * silu(gate[:, -spec.width :])
        return gated

    def mamba2(self, layer: int, zxbcdt: Floats, weights: Mamba2Weights, spec: Mamba2Spec) -> Floats:
        z, xbc, dt = np.split(zxbcdt, [spec.inner, spec.inner + spec.width], axis=1)
        steps = time_steps(dt, weights, spec)
        out = np.zeros((len(zxbcdt), spec.heads, spec.head_dim), np.float32)

        def step(state: State, token: int) -> State:
            last, memory = state
            last, mixed = causal_conv(last, xbc[token], weights.conv, weights.conv_bias)
            memory, out[token] = selective_scan(memory, mixed, steps[token], weights, spec)
            return last, memory

        self._recur(layer, [(spec.conv_width - 1, spec.width), (spec.heads, spec.state_dim, spec.head_dim)], step)
        gated = out.reshape(z.shape) * silu(z * np.float32(spec.z_scale))
        if weights.gain is None:
            return gated
        groups = len(z), spec.norm_groups, spec.inner // spec.norm_groups
        return rms_norm(gated.reshape(groups), weights.gain.reshape(groups[1:]), spec.eps).reshape(z.shape)

    def _recur(self, layer: int, shapes: Sequence[tuple[int, ...]], step: Callable[[State, int], State]) -> None:
        """Takes the state of each row of a recurrent layer through its tokens: `step` returns the state after a
        token."""
        states = self.cache.state(layer, shapes)
        moves = {move.row: move for move in self.batch.moves}
        for row, tokens in enumerate(self._row_tokens()):
            slot, move = self.batch.slots[row], moves.get(row, StateMove(row, -1, -1, 0))
            state = tuple(each[slot if move.begin < 0 else move.begin].copy() for each in states)
            if self.batch.positions[tokens.start] == 0:
                state = tuple(np.zeros_like(each) for each in state)
            for count, token in enumerate(range(tokens.start, tokens.stop), 1):
                state = step(state, token)
                if move.save >= 0 and count == move.after:
                    write(states, move.save, state)
            write(states, slot, state)

    def _row_tokens(self) -> list[slice]:
        starts = self.batch.row_start.tolist()
        return [slice(first, last) for first, last in pairwise(starts)]

    def _places(self, layer: int, row: int, positions: NDArray[np.integer]) -> tuple[Ints, NDArray[np.integer]]:
        """Returns where a layer keeps positions of a row's sequence: block ids and offsets in them."""
        table = self.batch.tables[self.cache.group(layer), row]
        return table[positions // self.cache.block_size], positions % self.cache.block_size


def write(states: State, index: int, state: State) -> None:
    for each, one in zip(states, state, strict=True):
        each[index] = one


def rms_norm(x: Floats, gain: Floats, eps: float) -> Floats:
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: Floats = x / np.sqrt(mean_square + np.float32(eps)) * gain
    return normed


def layer_norm(x: Floats, gain: Floats, bias: Floats, eps: float) -> Floats:
    centered = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(centered * centered, axis=-1, keepdims=True)
    normed: Floats = centered / np.sqrt(variance + np.float32(eps)) * gain + bias
    return normed


def norm_runs(x: Floats, gain: Floats, eps: float) -> Floats:
    runs = x.reshape(len(x), x.shape[1] // len(gain), len(gain))
    return rms_norm(runs, gain, eps).reshape(x.shape)


def norm_heads(x: Floats, gain: Floats, head_dim: int, eps: float) -> Floats:
    heads = split(x, head_dim)
    normed = layer_norm(heads, gain.reshape(heads.shape[1:]), np.zeros(1, np.float32), eps)
    return normed.reshape(x.shape)


def split_heads(qkv: Floats, spec: AttentionSpec) -> tuple[Floats, Floats, Floats]:
    """Splits [T, q + k + v] into [T, heads, D] and twice [T, kv_heads, D]."""
    q, k, v = np.split(split(qkv, spec.head_dim), [spec.heads, spec.heads + spec.kv_heads], axis=1)
    return q, k, v


def rotate(x: Floats, positions: Ints, rope: RopeSpec) -> Floats:
    """Rotates each pair of dimensions of every head by its position: [T, heads, D] -> [T, heads, D]."""
    angles = positions[:, None, None] * np.array(rope.inv_freq)  # [T, 1, pairs], in float64: positions can be large
    cos, sin = ((f(angles) * rope.scale).astype(np.float32) for f in (np.cos, np.sin))
    pairs = len(rope.inv_freq)
    left, right = slice(pairs), slice(pairs, 2 * pairs)
    if rope.interleaved:
        left, right = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    out = x.copy()
    out[..., left] = x[..., left] * cos - x[..., right] * sin
    out[..., right] = x[..., right] * cos + x[..., left] * sin
    return out


def attention(
    q: Floats, keys: Floats, values: Floats, places: tuple[Ints, int], spec: AttentionSpec, vectors: Vectors
) -> Floats:
    """Attends from tokens to C positions of their sequence: [T, heads, D], 2 * [C, kv_heads, D] -> [T, heads, D].
    `places` are the tokens' positions and the first of those C."""
    shared = spec.heads // spec.kv_heads
    keys, values = np.repeat(keys, shared, axis=1), np.repeat(values, shared, axis=1)  # [C, heads, D]
    scores = np.einsum("thd,chd->htc", q, keys) * np.float32(spec.scale)
    if spec.soft_cap:
        scores = soft_capped(scores, spec.soft_cap)
    if spec.distance_bias:
        scores += bias_of(*places, len(keys), spec, vectors["distance_bias"])
    if spec.causal or spec.window:
        scores[:, ~visible(*places, len(keys), spec)] = -np.inf
    weights = softmax_with_sinks(scores, vectors.get("sinks", np.full(spec.heads, -np.inf, np.float32)))
    out: Floats = np.einsum("htc,chd->thd", weights, values)
    return out


def bias_of(positions: Ints, first: int, context: int, spec: AttentionSpec, biases: Floats) -> Floats:
    reach = spec.distance_bias
    distances = np.clip(first + np.arange(context) - positions[:, None], -reach, reach)
    found: Floats = biases.reshape(spec.heads, -1)[:, distances + reach]
    return found


def softmax_with_sinks(scores: Floats, sinks: Floats) -> Floats:
    """Returns the softmax of each row of [heads, T, C] and its head's sink, whose own weight is left out."""
    highest = np.maximum(scores.max(axis=-1), sinks[:, None])[..., None]
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks[:, None, None] - highest)
    softened: Floats = weights / total
    return softened


def visible(positions: Ints, first: int, context: int, spec: AttentionSpec) -> NDArray[np.bool_]:
    others = first + np.arange(context)
    distance = positions[:, None] - others
    seen: NDArray[np.bool_] = distance >= 0 if spec.causal else distance > -spec.window
    if spec.window:
        seen &= distance < spec.window
    if spec.chunk:
        seen &= others >= (positions // spec.chunk * spec.chunk)[:, None]
    return seen


def query_scales(positions: Ints, spec: AttentionSpec) -> Floats:
    return (1 + spec.temperature * np.log1p((positions + 1) // spec.temperature_span)).astype(np.float32)


def soft_capped(x: Floats, cap: float) -> Floats:
    y: Floats = np.float32(cap) * np.tanh(x / np.float32(cap))
    return y


def choose(logits: Floats, bias: Floats | None, spec: ExpertSpec) -> tuple[NDArray[np.intp], Floats]:
    """Returns each token's experts, the best one first, and their weights: [T, count] -> 2 * [T, top_k]."""
    scores = SCORINGS[spec.scoring](logits)
    choice = scores if bias is None else scores + bias
    chosen = highest(np.where(in_best_groups(choice, spec), choice, -np.inf), spec.top_k)
    weights = np.take_along_axis(scores, chosen, axis=1)
    if spec.scoring == "softmax_top_k":
        weights = softmax(weights)
    if spec.renormalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
    return chosen, weights * np.float32(spec.scale)


def in_best_groups(choice: Floats, spec: ExpertSpec) -> NDArray[np.bool_]:
    size = spec.count // spec.groups
    groups = np.sort(choice.reshape(len(choice), spec.groups, size), axis=2)
    best = groups[..., -1:] if spec.group_score == "max" else groups[..., -2:]
    allowed = np.zeros((len(choice), spec.groups), np.bool_)
    np.put_along_axis(allowed, highest(best.sum(axis=2), spec.top_k_groups), True, axis=1)
    return np.repeat(allowed, size, axis=1)


def highest(x: Floats, count: int) -> NDArray[np.intp]:
    """Returns where the highest values of each row are, the first of equal ones first: [T, count]."""
    return np.argsort(-x, axis=1, kind="stable")[:, :count]


def softmax(x: Floats) -> Floats:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    y: Floats = powers / powers.sum(axis=1, keepdims=True)
    return y


GATES: dict[str, Callable[[Floats], Floats]] = {"silu": silu, "sigmoid": sigmoid}
SCORINGS: dict[str, Callable[[Floats], Floats]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "softmax_top_k": lambda logits: logits,
}


def causal_conv(
    last: Floats, x: Floats, taps: Floats, bias: Floats | None = None, act: Callable[[Floats], Floats] = silu
) -> tuple[Floats, Floats]:
    """Returns the inputs that the next token's convolution sees, and act of this one's."""
    seen = np.concatenate([last, x[None]])  # [conv_width, width]
    y: Floats = (seen * taps.reshape(len(x), len(seen)).T).sum(axis=0)
    return seen[1:], act(y if bias is None else y + bias)
