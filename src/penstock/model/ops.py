"""Defines the op vocabulary: every call that a model's forward pass may make.

A forward pass is written once against these calls. The reference backend (`backend/ref/ops.py`) executes them with
NumPy and defines them. The other backends record them into a program (`model/program.py`).

Symbols: T tokens in the step, S of them with logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from penstock.model.recurrence import ConvSpec, DeltaSpec, Mamba2Spec, ScanSpec
from penstock.model.spec import AttentionSpec, ExpertSpec

Weight = Any  # opaque result of a backend's packer
Vectors = Mapping[str, Weight]  # keys: names in a spec
Precision = Literal["activation", "float32"]  # the backend's activation type, or float32


V = TypeVar("V")


class DeltaInputs(NamedTuple, Generic[V]):
    """Holds the inputs of a gated delta net. A tensor may be wider than its role: q, k, v and beta are its first
    columns, z and alpha its last, so one product can compute two of them.
    """

    qkv: V  # [T, q + k + v]
    z: V  # [T, v], output gate
    beta: V  # [T, v_heads], write strength
    alpha: V  # [T, decay_width], decay rate


class DeltaWeights(NamedTuple):
    """Holds the vectors of a gated delta net."""

    conv: Weight  # [q + k + v, conv_width], the current token's factor last
    decay: Weight  # [v_heads], below 0
    dt_bias: Weight  # [decay_width]
    gain: Weight  # [v_dim]


class MlaWeights(NamedTuple):
    """Holds MLA's latent norm and the per-head matrices that map latents to keys and values."""

    gain: Weight  # [rank], norm of the latents
    k_b: Weight  # [heads, rank, nope]; its transpose maps latents to keys
    v_b: Weight  # [heads, v_head_dim, rank]; maps latents to values


class ConvWeights(NamedTuple):
    """Holds the vectors of a causal convolution."""

    conv: Weight  # [width, conv_width], the current token's factor last
    bias: Weight | None  # [width]


class ScanWeights(NamedTuple):
    """Holds the vectors of a selective scan."""

    decay: Weight  # [width, state_size], below 0
    skip: Weight  # [width], factor of the input added to the output


class Mamba2Weights(NamedTuple):
    """Holds the vectors of Mamba2."""

    conv: Weight  # [x + B + C, conv_width], the current token's factor last
    conv_bias: Weight | None  # [x + B + C]
    decay: Weight  # [heads], below 0
    dt_bias: Weight  # [heads]
    skip: Weight  # [heads]
    gain: Weight | None  # [heads * head_dim]; None: no norm


class ExpertWeights(NamedTuple):
    """Holds the matrices of all experts of a layer, packed by the backend."""

    up: Weight  # gate above up for each expert
    down: Weight
    choice_bias: Weight | None  # [count], added to the scores that select experts
    scale: Weight | None = None  # [count], multiplies each expert's weight


class Ops(Protocol[V]):
    def embed(self, table: Weight, partial: bool = False) -> V:
        """Returns the table's rows for the step's tokens: [T, dim]. If `partial`, tokens beyond the last row take the
        first one.
        """

    def embed_positions(self, table: Weight) -> V:
        """Returns the table's rows for the positions of the step's tokens: [T, dim]."""

    def add_norm(self, x: V, residual: V | None, gain: Weight, eps: float) -> tuple[V, V]:
        """Returns (rms_norm(r) * gain, r) for r = x + residual, or for r = x without a residual."""

    def add_layer_norm(self, x: V, residual: V | None, gain: Weight, bias: Weight, eps: float) -> tuple[V, V]:
        """Returns (layer_norm(r) * gain + bias, r) for r = x + residual, or for r = x without a residual."""

    def linear(self, x: V, weight: Weight, precision: Precision = "activation") -> V:
        """Returns x @ weight.T (+ bias): [*, in] -> [*, out]. Router logits and the output head ask for float32:
        rounding would change which experts or tokens come first."""

    def norm_qk(self, qkv: V, q_gain: Weight, k_gain: Weight, spec: AttentionSpec, eps: float) -> V:
        """Applies rms_norm to q and to k in runs as long as their gains (one head, or all heads at once) or, if
        spec.qk_norm is "layer", layer_norm to each head, whose gains are all heads' one after the other. With
        `spec.v_norm` each head of v is normed without a gain, else v stays as it is: [T, q + k + v] -> the same."""

    def norm_runs(self, x: V, gain: Weight, eps: float) -> V:
        """Applies rms_norm to runs of each row that are as long as the gain: [*, n * run] -> [*, n * run]."""

    def attend(self, layer: int, qkv: V, spec: AttentionSpec, vectors: Vectors) -> V:
        """Splits qkv into q, k and v, rotates q and k, writes k and v to the paged cache of `layer`, and attends from
        every token over its own sequence: [T, q + k + v] -> [T, q]. `vectors` are those in `spec.vectors`. With
        `spec.shares_kv`, qkv holds only q and the cache is only read: an earlier op has written this step's tokens.
        """

    def attend_mla(
        self, layer: int, q: V, kv: V, weights: MlaWeights, spec: AttentionSpec, eps: float, selected: V | None = None
    ) -> V:
        """Attends causally with keys and values that are projections of one latent vector per token (MLA).

        kv is [rope, latent]: applies rms_norm and the gain to the latents, rotates the rope part, and writes kv to the
        paged cache of `layer`. A head of q is [nope, rope]: rotates rope and multiplies nope by k_b, so that heads of
        [rope, rank] attend to kv as their keys, with the latents as values; the result is multiplied by v_b: [T, heads
        * (nope + rope)], [T, rope + rank] -> [T, heads * v_head_dim]. In `spec`, head_dim is rope + rank and v_dim is
        the rank. A backend may instead project the latents to keys and values. With `selected`, the result of
        `select_positions`, a token attends only to those positions.
        """

    def select_positions(self, layer: int, q: V, k: V, weights: V, spec: AttentionSpec) -> V:
        """Selects the positions that each token attends to, as in `spec.index`: [T, heads * head_dim], [T, head_dim],
        [T, heads] of the index -> [T, top_k] positions, ascending, in float32. Rotates q and k and writes k next to the
        KV of `layer`. A token that sees at most top_k positions selects all of them; the rest of its row is undefined.
        """

    def act_and_mul(self, x: V, act: str) -> V:
        """Returns act(left half) * right half: [T, 2 * hidden] -> [T, hidden]; act is "silu", "gelu" or "gelu_tanh"."""

    def sparse_act_and_mul(self, x: V, act: str, cutoff: float) -> V:
        """Returns act(max(left half - c, 0)) * right half, where c lies `cutoff` standard deviations above the mean of
        each row's left half: [T, 2 * hidden] -> [T, hidden]; act is as in `act_and_mul`."""

    def gate_columns(self, x: V, y: V, first: int, act: str) -> V:
        """Returns act(x) * those columns of y that begin at `first`: [T, n], [T, m] -> [T, n]; act is as in
        `act_and_mul`."""

    def activate(self, x: V, act: str) -> V:
        """Returns act of each value: "silu", "gelu", "gelu_tanh" (its approximation), "relu" or "relu2", its square."""

    def sigmoid_mul(self, x: V, gate: V) -> V:
        """Returns x * sigmoid(gate), where gate is as wide as x or has one value for each row."""

    def add(self, x: V, y: V) -> V:
        """Returns x + y."""

    def scale(self, x: V, factor: float) -> V:
        """Returns x * factor."""

    def soft_cap(self, x: V, cap: float) -> V:
        """Returns cap * tanh(x / cap)."""

    def take_columns(self, x: V, first: int, width: int, gain: Weight | None = None) -> V:
        """Returns `width` columns of x starting at `first`, times `gain` if given."""

    def concat(self, x: V, y: V) -> V:
        """Returns the columns of x followed by those in y: [T, n], [T, m] -> [T, n + m]."""

    def match_rms(self, x: V, like: V) -> V:
        """Returns x with each run of `like`'s width scaled to the root mean square of `like`'s row. The mean square in
        the divisor is at least 1e-5: [T, n * dim], [T, dim] -> [T, n * dim].
        """

    def mix_streams(self, x: V, coefficients: V) -> V:
        """Adds a mix of all n streams to each one: y[j] = x[j] + sum over i of coefficients[n * j + i] * x[i]:
        [T, n * dim], [T, n * n] -> [T, n * dim]."""

    def correct_streams(self, x: V, new: V, coefficients: V, active: int) -> V:
        """Moves all streams by the error of one: y[j] = x[j] + (1 + coefficients[j]) * (new - x[active]):
        [T, n * dim], [T, dim], [T, n] -> [T, n * dim]."""

    def add_to_streams(self, x: V, y: V) -> V:
        """Adds y to all streams except the first: [T, n * dim], [T, dim] -> [T, n * dim]."""

    def take_sampled(self, x: V) -> V:
        """Returns the sampled rows: [T, dim] -> [S, dim]."""

    def pool(self, x: V) -> None:
        """Marks the values [T, dim] from which embeddings are pooled. A forward pass calls it once."""

    def store_hidden(self, number: int, x: V, ahead: int = 0) -> None:
        """Stores hidden states of kind `number`, [T, width] or [S, width], in the sequence's KV blocks for other
        programs to load. Each row is stored at its token's position plus `ahead`, in the first KV layer group without a
        window. Kinds are numbered from 0.
        """

    def load_hidden(self, number: int, width: int) -> V:
        """Returns the last stored rows of any program at the positions of the step's tokens: [T, width]."""

    def moe(self, x: V, router_logits: V, experts: ExpertWeights, spec: ExpertSpec) -> V:
        """Routes each token to the experts that its router logits select, and returns their weighted sum:
        [T, dim], [T, count] -> [T, dim]. `spec.act` is as in `act_and_mul`, or "clamped": min(left, 7) * sigmoid(1.702
        * min(left, 7)) * (1 + right, clamped to between -7 and 7). Experts without a gate use the acts of `activate`.
        """

    def delta_net(self, layer: int, x: DeltaInputs[V], weights: DeltaWeights, spec: DeltaSpec, eps: float) -> V:
        """Applies the gated delta rule to each token: -> [T, v].

        q, k and v pass a causal convolution and silu. Each head's q and k are scaled to length 1, and q is divided by
        the root of k_dim. Then, token by token, each value head updates its state M [k_dim, v_dim]: M *= e^(decay *
        softplus(alpha + dt_bias)), with one alpha for a head or for each row of M; M += k (sigmoid(beta) * (v - k M));
        o = q M. The result is rms_norm(o) * gain * gate(z), normed in each head. M and the last inputs of the
        convolution are the state of the sequence's slot, which is zero at position 0 (Batch.moves describes the other
        cases)."""

    def causal_conv(self, layer: int, x: V, weights: ConvWeights, spec: ConvSpec) -> V:
        """Convolves each channel with the last tokens of its sequence, and adds the bias: [T, *] -> [T, width].

        Without a gate it takes the first `width` columns of x and applies silu to the result. With one, x is [T, b + c
        + u] and the result is c * conv(b * u). The last inputs of the convolution are the state of the sequence's slot
        (see delta_net).
        """

    def selective_scan(self, layer: int, x: V, dt: V, b: V, c: V, gate: V, weights: ScanWeights, spec: ScanSpec) -> V:
        """Applies Mamba's selective scan: [T, width] -> [T, width]. `dt` is [T, width], `b` and `c` are
        [T, state_size], and the last `width` columns of `gate` are taken.

        Token by token, each channel updates its state h: h = h * e^(decay * step) + step * x * b for step =
        softplus(dt); the result is (h . c + skip * x) * silu(gate). h is the state of the sequence's slot (see
        delta_net)."""

    def mamba2(self, layer: int, zxbcdt: V, weights: Mamba2Weights, spec: Mamba2Spec) -> V:
        """Applies the selective scan of Mamba2: [T, z + x + B + C + dt] -> [T, x].

        x, B and C pass a causal convolution and silu. Then, token by token, each head updates its state M: dt =
        softplus(dt * dt_scale + dt_bias), clamped; M *= e^(decay * dt); M += B (dt * x); y = C M + skip * x. The result
        is rms_norm(y * silu(z * z_scale)) * gain, normed in each of norm_groups parts; without a gain it is not normed.
        M and the last inputs of the convolution are the state of the sequence's slot, as in `delta_net`."""
