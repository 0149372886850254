"""Computes multi-head latent attention (MLA) as in DeepSeek V2 and V3, from one small vector per token.

Keys and values of all heads are projections of one latent vector (`kv_b`), and only the latent vector is cached, after
the rotated dimensions. In the absorbed form, one matrix per head maps queries to the latents' space and another maps
the attention's result back: decoding reads 576 numbers per token instead of 40,960 (V3). Prompts cost more arithmetic:
2 * heads * (576 + 512) per pair of positions, against 2 * heads * (192 + 128) with expanded keys and values. One op has
both projections, so a backend may choose.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.decoder import Decoder, Layer, Norm
from penstock.model.ops import MlaWeights, Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.spec import AttentionSpec, MlaSpec, ModelSpec

INNER_EPS = 1e-6  # epsilon of the inner norms, independent of the others


@dataclass(frozen=True, slots=True)
class Queries:
    """Projects queries directly, or through a low-rank, normed intermediate."""

    first: Weight
    norm: Norm | None
    second: Weight | None

    def __call__(self, ops: Ops[V], x: V) -> tuple[V, V]:
        if self.norm is None:
            return ops.linear(x, self.first), x
        low_rank, _ = self.norm(ops, ops.linear(x, self.first))
        return ops.linear(low_rank, self.second), low_rank


@dataclass(frozen=True, slots=True)
class Indexer:
    """Selects the positions of a sparse attention layer (DSA), with one small key per token."""

    q: Weight
    k: Weight
    norm: Norm
    weights: Weight  # projects x to one weight per head

    def __call__(self, ops: Ops[V], layer: int, x: V, low_rank: V, spec: AttentionSpec) -> V:
        k, _ = self.norm(ops, ops.linear(x, self.k))
        weights = ops.linear(x, self.weights, precision="float32")
        return ops.select_positions(layer, ops.linear(low_rank, self.q), k, weights, spec)


@dataclass(frozen=True, slots=True)
class MlaAttention:
    """Computes MLA with its projections."""

    layer: int
    spec: AttentionSpec
    queries: Queries
    kv_a: Weight
    weights: MlaWeights
    o: Weight
    indexer: Indexer | None = None

    def __call__(self, ops: Ops[V], x: V) -> V:
        return self.attend(ops, x, None)[0]

    def attend(self, ops: Ops[V], x: V, selected: V | None) -> tuple[V, V | None]:
        """Returns the output and the attended positions: this layer's selection or, without an indexer, `selected`;
        None: all.
        """
        q, low_rank = self.queries(ops, x)
        if self.indexer is not None:
            selected = self.indexer(ops, self.layer, x, low_rank, self.spec)
        kv = ops.linear(x, self.kv_a)
        y = ops.attend_mla(self.layer, q, kv, self.weights, self.spec, INNER_EPS, selected)
        return ops.linear(y, self.o), selected


@dataclass(frozen=True, slots=True)
class SparseDecoder:
    """Computes logits with sparse attention layers, which may share their selected positions."""

    decoder: Decoder

    def forward(self, ops: Ops[V]) -> V:
        x: V = self.decoder.ends.enter(ops)
        residual: V | None = None
        selected: V | None = None
        for layer in self.decoder.layers:
            assert isinstance(layer, Layer)
            norm, mixer = layer.mixer.pre_norm, layer.mixer.part
            assert norm is not None
            assert isinstance(mixer, MlaAttention)
            x, residual = norm(ops, x, residual)
            x, selected = mixer.attend(ops, x, selected)
            x, residual = layer.mlp(ops, x, residual)
        return self.decoder.ends.leave(ops, x, residual)


def attention(spec: ModelSpec, pack: Packer, layer: int) -> MlaAttention:
    """Builds a layer's MLA. Some checkpoints have both halves of kv_b in one tensor."""
    a, name, heads = spec.attention(layer), f"layers.{layer}", spec.mla
    assert heads is not None
    rotated, rank = a.head_dim - a.v_dim, a.v_dim
    kv_a = pack.matrix((f"{name}.k_rope", rotated), (f"{name}.latent", rank), width=spec.dim)
    if pack.has(f"{name}.kv_b"):
        k_b, v_b = pack.keys_and_values(f"{name}.kv_b", a.heads, heads.qk_nope_head_dim, heads.v_head_dim, rank)
    else:
        k_b = pack.heads(f"{name}.k_b", a.heads, rank, heads.qk_nope_head_dim)
        v_b = pack.heads(f"{name}.v_b", a.heads, heads.v_head_dim, rank)
    weights = MlaWeights(pack.vector(f"{name}.kv_norm", rank), k_b, v_b)
    o = pack.matrix((f"{name}.o", spec.dim), width=a.heads * heads.v_head_dim)
    queries, indexer = queries_of(spec, heads, pack, name), indexer_of(spec, pack, layer)
    return MlaAttention(spec.kv_layer(layer), a, queries, kv_a, weights, o, indexer)


def indexer_of(spec: ModelSpec, pack: Packer, layer: int) -> Indexer | None:
    index, name = spec.attention(layer).index, f"layers.{layer}"
    if index is None or index.shared:
        return None
    assert spec.mla is not None
    bias = pack.vector(f"{name}.index_norm.bias", index.head_dim)
    return Indexer(
        pack.matrix((f"{name}.index_q", index.heads * index.head_dim), width=spec.mla.q_lora_rank),
        pack.matrix((f"{name}.index_k", index.head_dim), width=spec.dim),
        Norm(pack.vector(f"{name}.index_norm", index.head_dim), INNER_EPS, bias),
        pack.matrix((f"{name}.index_weights", index.heads), width=spec.dim),
    )


def queries_of(spec: ModelSpec, heads: MlaSpec, pack: Packer, name: str) -> Queries:
    width = spec.attn.heads * (heads.qk_nope_head_dim + spec.attn.head_dim - spec.attn.v_dim)
    if not heads.q_lora_rank:
        return Queries(pack.matrix((f"{name}.q", width), width=spec.dim), None, None)
    return Queries(
        pack.matrix((f"{name}.q_a", heads.q_lora_rank), width=spec.dim),
        Norm(pack.vector(f"{name}.q_norm", heads.q_lora_rank), INNER_EPS),
        pack.matrix((f"{name}.q_b", width), width=heads.q_lora_rank),
    )
