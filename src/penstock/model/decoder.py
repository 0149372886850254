"""Builds decoders: an embedding, layers of a mixer and an MLP with their norms, and an output head.

A family's file defines its mixers and norm placement. Weights are looked up by canonical name (names.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import numpy as np

from penstock.model.ops import ExpertWeights, Ops, V, Vectors, Weight
from penstock.model.packer import Packer
from penstock.model.spec import AttentionSpec, ExpertSpec, ModelSpec


class Part(Protocol):
    """Maps [T, dim] to [T, dim]: a mixer (attention or a substitute) or an MLP."""

    def __call__(self, ops: Ops[V], x: V) -> V: ...


@dataclass(frozen=True, slots=True)
class Norm:
    """Computes an RMS norm or, with a bias, a layer norm."""

    gain: Weight
    eps: float
    bias: Weight | None = None

    def __call__(self, ops: Ops[V], x: V, residual: V | None = None) -> tuple[V, V]:
        if self.bias is None:
            return ops.add_norm(x, residual, self.gain, self.eps)
        return ops.add_layer_norm(x, residual, self.gain, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Attention:
    """Computes attention and the projections around it."""

    layer: int  # index in the KV cache
    spec: AttentionSpec
    eps: float
    qkv: Weight
    o: Weight
    qk_norms: tuple[Weight, ...]  # q and k, only q with shared KV, or none
    vectors: Vectors
    gate: Weight | None = None

    def __call__(self, ops: Ops[V], x: V) -> V:
        qkv = ops.linear(x, self.qkv)
        if len(self.qk_norms) == 2:
            qkv = ops.norm_qk(qkv, *self.qk_norms, self.spec, self.eps)
        elif self.qk_norms:
            qkv = ops.norm_runs(qkv, self.qk_norms[0], self.eps)
        y = ops.attend(self.layer, qkv, self.spec, self.vectors)
        if self.gate is not None:
            y = ops.sigmoid_mul(y, ops.linear(x, self.gate))
        return ops.linear(y, self.o)


@dataclass(frozen=True, slots=True)
class Mlp:
    """Computes an MLP, gated or not."""

    act: str
    up: Weight  # gate above up, if gated
    down: Weight
    gated: bool = True

    def __call__(self, ops: Ops[V], x: V) -> V:
        h = ops.linear(x, self.up)
        h = ops.act_and_mul(h, self.act) if self.gated else ops.activate(h, self.act)
        return ops.linear(h, self.down)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Computes an MLP that every token uses in addition to the routed experts. A gate may scale its output."""

    mlp: Mlp
    gate: Weight | None

    def __call__(self, ops: Ops[V], x: V) -> V:
        y = self.mlp(ops, x)
        return y if self.gate is None else ops.sigmoid_mul(y, ops.linear(x, self.gate))


@dataclass(frozen=True, slots=True)
class MoE:
    """Routes each token to experts and adds the shared expert, if any."""

    spec: ExpertSpec
    router: Weight
    experts: ExpertWeights
    shared: SharedExpert | None
    latent: tuple[Weight, Weight] | None = None  # projections into and out of the experts' width

    def __call__(self, ops: Ops[V], x: V) -> V:
        router_logits = ops.linear(x, self.router, precision="float32")
        inner = x if self.latent is None else ops.linear(x, self.latent[0])
        y = ops.moe(inner, router_logits, self.experts, self.spec)
        if self.latent is not None:
            y = ops.linear(y, self.latent[1])
        return ops.add(self.shared(ops, x), y) if self.shared else y


@dataclass(frozen=True, slots=True)
class Block:
    """Adds a part's output to the residual stream, with a norm before the part, after it, or both."""

    part: Part
    pre_norm: Norm | None
    post_norm: Norm | None

    def __call__(self, ops: Ops[V], x: V, residual: V | None) -> tuple[V, V | None]:
        if self.pre_norm is None:
            return self._without_pre_norm(ops, x)
        x, residual = self.pre_norm(ops, x, residual)
        x = self.part(ops, x)
        if self.post_norm is not None:
            x, _ = self.post_norm(ops, x)
        return x, residual

    def _without_pre_norm(self, ops: Ops[V], x: V) -> tuple[V, None]:
        """Applies the part to the residual stream itself, which must already be summed."""
        assert self.post_norm is not None
        y, _ = self.post_norm(ops, self.part(ops, x))
        return ops.add(y, x), None


@dataclass(frozen=True, slots=True)
class Ends:
    """Holds the embedding, final norm and output head around the layers."""

    spec: ModelSpec
    embed: Weight
    positions: Weight | None
    norm: Norm
    head: Weight
    fuse: Weight | None = None  # projects the states in `spec.observed`

    def enter(self, ops: Ops[V]) -> V:
        """Returns the embeddings of the step's tokens: [T, dim]."""
        x = scaled(ops, ops.embed(self.embed), self.spec.embed_scale)
        return x if self.positions is None else ops.add(x, ops.embed_positions(self.positions))

    def leave(self, ops: Ops[V], x: V, residual: V | None) -> V:
        """Returns the logits of the sampled rows, [S, vocab], or an encoder's hidden states."""
        x, _ = self.norm(ops, x, residual)
        ops.pool(x)
        if self.spec.stores_hidden:
            ops.store_hidden(0, x)
        if self.spec.encoder:
            return ops.take_sampled(x)
        return self.logits(ops, ops.take_sampled(x))

    def logits(self, ops: Ops[V], rows: V) -> V:
        """Returns the logits of normed rows: [S, dim] -> [S, vocab]."""
        logits = ops.linear(scaled(ops, rows, self.spec.logit_scale), self.head, precision="float32")
        return ops.soft_cap(logits, self.spec.logit_cap) if self.spec.logit_cap else logits


@dataclass(frozen=True, slots=True)
class Layer:
    """Computes a mixer and the MLP that follows it."""

    mixer: Block
    mlp: Block

    def __call__(self, ops: Ops[V], x: V, residual: V | None) -> tuple[V, V | None]:
        return self.mlp(ops, *self.mixer(ops, x, residual))


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """Computes a mixer and an MLP from the same residual stream and adds both to it. They share a norm unless the MLP
    has its own.
    """

    norm: Norm
    mixer: Part
    mlp: Part
    mlp_norm: Norm | None = None

    def __call__(self, ops: Ops[V], x: V, residual: V | None) -> tuple[V, V | None]:
        x, residual = self.norm(ops, x, residual)
        mixed = self.mixer(ops, x)
        if self.mlp_norm is not None:
            x, _ = self.mlp_norm(ops, residual)
        return ops.add(mixed, self.mlp(ops, x)), residual


@dataclass(frozen=True, slots=True)
class Decoder:
    """Computes logits with layers of a mixer and an MLP. Most families are one of these."""

    layers: tuple[Layer | ParallelLayer | Block, ...]
    ends: Ends

    def forward(self, ops: Ops[V]) -> V:
        x: V = self.ends.enter(ops)
        residual: V | None = None
        streams: list[V] = []
        observed = self.ends.spec.observed.layers if self.ends.spec.observed else ()
        for at, layer in enumerate((*self.layers, None)):
            if at in observed:
                streams.append(x if residual is None else ops.add(x, residual))
            if layer is not None:
                x, residual = layer(ops, x, residual)
        if streams:
            ops.store_hidden(0, ops.linear(reduce(ops.concat, streams), self.ends.fuse))
        return self.ends.leave(ops, x, residual)


def scaled(ops: Ops[V], x: V, factor: float) -> V:
    return x if factor == 1 else ops.scale(x, factor)


MakePart = Callable[[ModelSpec, Packer, int], Part]
MakeNorm = Callable[[ModelSpec, Packer, str], Norm]


def attention(spec: ModelSpec, pack: Packer, layer: int, width: int = 0) -> Attention:
    """Builds a layer's attention; `width` is its input width if that differs from the model's. With an output gate, q
    has each head's queries followed by its gate.
    """
    a, name, width = spec.attention(layer), f"layers.{layer}", width or spec.dim
    kv = () if a.shares_kv else ((f"{name}.k", a.kv_width), (f"{name}.{'k' if a.v_is_k else 'v'}", a.kv_width))
    if a.output_gate:
        queries, gates = alternating(a.heads, a.head_dim, a.head_dim)
        qkv = pack.matrix((f"{name}.q", 2 * a.q_width, queries), *kv, width=width)
        gate = pack.matrix((f"{name}.q", 2 * a.q_width, gates), width=width)
    else:
        qkv, gate = pack.matrix((f"{name}.q", a.q_width), *kv, width=width), None
    o = pack.matrix((f"{name}.o", spec.dim), width=a.q_width)
    vectors = {vector: pack.vector(f"{name}.{vector}", size) for vector, size in a.vectors.items()}
    return Attention(spec.kv_layer(layer), a, spec.eps, qkv, o, qk_norms(spec, pack, layer), vectors, gate)


def qk_norms(spec: ModelSpec, pack: Packer, layer: int) -> tuple[Weight, ...]:
    """Returns the q and k gains, per head or over all heads; empty without QK norm."""
    a = spec.attention(layer)
    if not a.qk_norm:
        return ()
    if a.qk_norm == "unit":
        return pack.ones(a.head_dim), pack.ones(a.head_dim)
    sizes = {"q": a.head_dim, "k": a.head_dim} if a.qk_norm == "head" else {"q": a.q_width, "k": a.kv_width}
    return tuple(
        pack.vector(f"layers.{layer}.{part}_norm", size, spec.gain_offset)
        for part, size in sizes.items()
        if part == "q" or not a.shares_kv
    )


def alternating(groups: int, *sizes: int) -> list[list[tuple[int, int]]]:
    starts = [sum(sizes[:kind]) for kind in range(len(sizes))]
    return [
        [(group * sum(sizes) + start, group * sum(sizes) + start + size) for group in range(groups)]
        for start, size in zip(starts, sizes, strict=True)
    ]


def mlp_or_experts(spec: ModelSpec, pack: Packer, layer: int) -> Mlp | MoE:
    name = f"layers.{layer}"
    if spec.experts is None or layer in spec.dense:
        return mlp(spec, pack, name, spec.hidden)
    router = pack.matrix((f"{name}.router", spec.experts.count), width=spec.dim)
    width = spec.experts.width or spec.dim
    experts, latent = pack.experts(name, spec.experts, width), None
    if spec.experts.width:
        outer = pack.matrix((f"{name}.latent_out", spec.dim), width=width)
        latent = pack.matrix((f"{name}.latent_in", width), width=spec.dim), outer
    return MoE(spec.experts, router, experts, shared_expert(spec, pack, f"{name}.shared"), latent)


def shared_expert(spec: ModelSpec, pack: Packer, name: str) -> SharedExpert | None:
    if not spec.shared_hidden:
        return None
    make = mlp if spec.experts is None or spec.experts.gated else ungated_mlp
    made = make(spec, pack, name, spec.shared_hidden)
    return SharedExpert(made, pack.matrix((f"{name}.router", 1), width=spec.dim) if spec.shared_gated else None)


def mlp(spec: ModelSpec, pack: Packer, name: str, hidden: int) -> Mlp:
    up = pack.matrix((f"{name}.gate", hidden), (f"{name}.up", hidden), width=spec.dim)
    return Mlp(spec.act, up, pack.matrix((f"{name}.down", spec.dim), width=hidden))


def plain_mlp(spec: ModelSpec, pack: Packer, layer: int) -> Mlp:
    return ungated_mlp(spec, pack, f"layers.{layer}", spec.hidden)


def ungated_mlp(spec: ModelSpec, pack: Packer, name: str, hidden: int) -> Mlp:
    up = pack.matrix((f"{name}.up", hidden), width=spec.dim)
    return Mlp(spec.act, up, pack.matrix((f"{name}.down", spec.dim), width=hidden), gated=False)


def rms_norm(spec: ModelSpec, pack: Packer, name: str) -> Norm:
    return Norm(pack.vector(name, spec.dim, spec.gain_offset), spec.eps)


def layer_norm(spec: ModelSpec, pack: Packer, name: str) -> Norm:
    return Norm(pack.vector(name, spec.dim), spec.eps, pack.vector(f"{name}.bias", spec.dim))


def unbiased_layer_norm(spec: ModelSpec, pack: Packer, name: str) -> Norm:
    """Builds a layer norm without a bias."""
    return Norm(pack.vector(name, spec.dim), spec.eps, pack.computed(name, spec.dim, np.zeros_like))


def position_table(spec: ModelSpec, pack: Packer) -> Weight:
    """Builds the table of learned positions, starting at `first_position`."""
    rows = spec.first_position + spec.max_len
    return pack.matrix(("positions", rows, [(spec.first_position, rows)]), width=spec.dim)


def build(
    spec: ModelSpec,
    pack: Packer,
    *,
    mixer: MakePart = attention,
    mlp: MakePart = mlp_or_experts,
    norm: MakeNorm = rms_norm,
    pre_norm: bool = True,
    post_norm: bool = False,
    learned_positions: bool = False,
) -> Decoder:
    """Builds a decoder from these mixers, MLPs and norms; defaults are Llama's."""

    two_norms = spec.parallel and any(pack.has(f"layers.{i}.mlp_norm") for i in range(spec.layers))

    def block(layer: int, kind: str, make: MakePart) -> Block:
        before = norm(spec, pack, f"layers.{layer}.{kind}_norm") if pre_norm else None
        part = make(spec, pack, layer)
        return Block(part, before, norm(spec, pack, f"layers.{layer}.after_{kind}_norm") if post_norm else None)

    def layer(i: int) -> Layer | ParallelLayer:
        if spec.parallel:
            first, own = f"layers.{i}.attn_norm", f"layers.{i}.mlp_norm"
            second = norm(spec, pack, own) if two_norms else None
            return ParallelLayer(norm(spec, pack, first), mixer(spec, pack, i), mlp(spec, pack, i), second)
        return Layer(block(i, "attn", mixer), block(i, "mlp", mlp))

    layers = tuple(layer(i) for i in range(spec.layers))
    return Decoder(layers, ends(spec, pack, norm, position_table(spec, pack) if learned_positions else None))


def ends(spec: ModelSpec, pack: Packer, norm: MakeNorm = rms_norm, positions: Weight | None = None) -> Ends:
    embed = pack.matrix(("embed", spec.vocab), width=spec.dim)
    head = embed if spec.tied else pack.matrix(("head", spec.vocab), width=spec.dim)
    seen = spec.observed
    fuse = pack.matrix(("fuse", seen.width), width=len(seen.layers) * spec.dim) if seen else None
    return Ends(spec, embed, positions, norm(spec, pack, "norm"), head, fuse)
