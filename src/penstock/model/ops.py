"""The op vocabulary: everything a model file may say.

A model's forward pass is written once against these calls. A backend gives them a meaning: the reference computes
at once with NumPy, the CPU backend records them into a native program. `backend/ref` is their definition.

Symbols: T tokens in the step, S of them whose logits are wanted.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

from penstock.model.spec import AttentionSpec, DeltaSpec, ExpertSpec

Weight = Any  # whatever this backend's `pack` returned; a model only carries it


class DeltaWeights(NamedTuple):
    """Vectors of a delta net."""

    conv: Weight  # [q + k + v, taps], the tap of the token itself last
    decay: Weight  # [v_heads], below 0
    dt: Weight  # [v_heads]
    gain: Weight  # [v_dim]


V = TypeVar("V")


class Ops(Protocol[V]):
    def embed(self, table: Weight) -> V:
        """Rows of the table for the step's tokens: [T, dim]."""

    def add_norm(self, x: V, residual: V | None, gain: Weight, eps: float) -> tuple[V, V]:
        """r = x + residual (x alone when there is none); returns (rms_norm(r) * gain, r)."""

    def linear(self, x: V, weight: Weight) -> V:
        """x @ weight.T (+ bias): [*, in] -> [*, out]."""

    def norm_qk(self, qkv: V, q_gain: Weight, k_gain: Weight, spec: AttentionSpec, eps: float) -> V:
        """rms_norm of q and of k in runs as long as their gains, a head or all of them, times those; v as it is:
        [T, q + k + v] -> the same."""

    def attend(self, layer: int, qkv: V, spec: AttentionSpec, sinks: Weight | None = None) -> V:
        """Splits qkv into q, k, v; rotates q and k; writes k and v to the paged cache of `layer`; attention of every
        token over its own sequence, causal or not: [T, q + k + v] -> [T, q]. `sinks` [heads], where `spec` has them."""

    def gated(self, x: V, act: str) -> V:
        """act(left half) * right half: [T, 2 * hidden] -> [T, hidden]. `act` is "silu" or "gelu_tanh"."""

    def add(self, x: V, y: V) -> V: ...

    def scale(self, x: V, factor: float) -> V: ...

    def soft_cap(self, x: V, cap: float) -> V:
        """cap * tanh(x / cap): nearly x where that is small, and never beyond cap."""

    def take_sampled(self, x: V) -> V:
        """The rows whose logits are wanted: [T, dim] -> [S, dim]."""

    def pool(self, x: V) -> None:
        """Says which values embeddings are pooled from, [T, dim]: to be said once."""

    def add_layer_norm(self, x: V, residual: V | None, gain: Weight, bias: Weight, eps: float) -> tuple[V, V]:
        """As add_norm, of what remains when each row's mean is taken off, with a bias added to it."""

    def activate(self, x: V, act: str) -> V:
        """act of each value: "silu", "gelu", "gelu_tanh" (its approximation) or "relu"."""

    def embed_positions(self, table: Weight) -> V:
        """Rows of the table for the positions of the step's tokens: [T, dim]."""

    def experts(self, x: V, scores: V, bank: Weight, spec: ExpertSpec) -> V:
        """The experts that a router's logits choose compute each token, and what they give is weighed and added up:
        [T, dim], [T, count] -> [T, dim]. `act`: as in `gated`, or "clamped", which is min(left, 7) * sigmoid(1.702 *
        min(left, 7)) * (1 + right, that between -7 and 7)."""

    def linear_heads(self, x: V, weight: Weight, kept: int = 0) -> V:
        """A product of its own for each head, weight [heads, b, a]: [T, heads * (a + kept)] -> [T, heads * (kept + b)].
        What a head has after those that are multiplied stays, and comes before its product."""

    def attend_latent(self, layer: int, q: V, kv: V, gain: Weight, spec: AttentionSpec, eps: float) -> V:
        """Attention with one KV head, whose values are the last v_dim dimensions of its keys: rms_norm of those of kv,
        times gain; rotates q and kv, which turns dimensions before them; writes kv to the paged cache of `layer`;
        causal attention: [T, heads * head_dim], [T, head_dim] -> [T, heads * v_dim]."""

    def gate_by(self, x: V, gate: V) -> V:
        """x * sigmoid(gate), where gate is as wide as x or one value for each row."""

    def delta_net(self, layer: int, qkvz: V, ba: V, weights: DeltaWeights, spec: DeltaSpec, eps: float) -> V:
        """q, k and v are convolved with those of the last tokens, then silu. Each head's q and k are made one long, q
        divided by the root of k_dim. Then token by token, in each value head, with memory M: M *= e^(decay *
        softplus(a + dt)); M += k (sigmoid(b) * (v - k M)); o = q M. What comes out is rms_norm(o) * gain * silu(z),
        normed in each head: [T, q + k + v + z], [T, b + a] -> [T, v]. The memory of a sequence and what it convolved
        last are the state of its slot, of which nothing is there at position 0 (see Batch.moves for the rest)."""
