"""Latent attention, as DeepSeek V2 and V3 have it, in a form that keeps one small vector of each token.

Keys and values of all heads are made of a latent vector. Instead, queries are brought to where the latents are and what
is found there back, by a matrix for each head; the part of keys that is turned by position lies before the latents.
Decoding reads 576 numbers of each token where it would read 40,960 (V3). Whole prompts cost more arithmetic: of each
pair of positions 2 * heads * (576 + 512) where expanded keys and values would take 2 * heads * (192 + 128).
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.ops import Ops, V, Weight
from penstock.model.spec import AttentionSpec, LatentSpec, ModelSpec
from penstock.model.weights import Packer

INNER_EPS = 1e-6  # of the norms inside, whatever the others have


@dataclass(frozen=True, slots=True)
class Queries:
    """In one product, or in two with a norm between them."""

    first: Weight
    norm: Weight | None
    then: Weight | None

    def __call__(self, ops: Ops[V], x: V) -> V:
        q = ops.linear(x, self.first)
        if self.norm is None:
            return q
        return ops.linear(ops.add_norm(q, None, self.norm, INNER_EPS)[0], self.then)


@dataclass(frozen=True, slots=True)
class Attention:
    layer: int
    spec: AttentionSpec
    queries: Queries
    to_latent: Weight  # of queries, for each head
    kv: Weight
    gain: Weight  # of latents
    from_latent: Weight  # of what is found, for each head
    o: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        q = ops.linear_heads(self.queries(ops, x), self.to_latent, kept=self.spec.head_dim - self.spec.v_dim)
        found = ops.attend_latent(self.layer, q, ops.linear(x, self.kv), self.gain, self.spec, INNER_EPS)
        return ops.linear(ops.linear_heads(found, self.from_latent), self.o)


def attention(spec: ModelSpec, pack: Packer, layer: int) -> Attention:
    a, name, latent = spec.attention(layer), f"layers.{layer}", spec.latent
    assert latent is not None
    turned, rank = a.head_dim - a.v_dim, a.v_dim
    kv = pack.matrix((f"{name}.k_rope", turned), (f"{name}.latent", rank), width=spec.dim)
    if pack.has(f"{name}.kv_b"):
        up, down = pack.keys_and_values(f"{name}.kv_b", a.heads, latent.key_dim, latent.value_dim, rank)
    else:
        up = pack.heads(f"{name}.k_b", a.heads, rank, latent.key_dim)
        down = pack.heads(f"{name}.v_b", a.heads, latent.value_dim, rank)
    gain = pack.vector(f"{name}.kv_norm", rank)
    o = pack.matrix((f"{name}.o", spec.dim), width=a.heads * latent.value_dim)
    queries = queries_of(spec, latent, pack, name, a.heads * (latent.key_dim + turned))
    return Attention(layer, a, queries, up, kv, gain, down, o)


def queries_of(spec: ModelSpec, latent: LatentSpec, pack: Packer, name: str, width: int) -> Queries:
    if not latent.q_rank:
        return Queries(pack.matrix((f"{name}.q", width), width=spec.dim), None, None)
    return Queries(
        pack.matrix((f"{name}.q_a", latent.q_rank), width=spec.dim),
        pack.vector(f"{name}.q_norm", latent.q_rank),
        pack.matrix((f"{name}.q_b", width), width=latent.q_rank),
    )
