"""What decoders are made of: attention, a gated MLP, and what comes before and after the layers.

A family's file says how they hang together; weights are taken from the checkpoint by canonical name (names.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.model.ops import Ops, V, Weight
from penstock.model.spec import AttentionSpec, ExpertSpec, ModelSpec
from penstock.model.weights import Packer


class Part(Protocol):
    """Of a layer: takes and gives [T, dim]."""

    def __call__(self, ops: Ops[V], x: V) -> V: ...


@dataclass(frozen=True, slots=True)
class Attention:
    layer: int
    spec: AttentionSpec
    eps: float
    qkv: Weight
    o: Weight
    norms: tuple[Weight, Weight] | None  # of q and k
    sinks: Weight | None

    def __call__(self, ops: Ops[V], x: V) -> V:
        qkv = ops.linear(x, self.qkv)
        if self.norms:
            qkv = ops.norm_qk(qkv, *self.norms, self.spec, self.eps)
        return ops.linear(ops.attend(self.layer, qkv, self.spec, self.sinks), self.o)


@dataclass(frozen=True, slots=True)
class Mlp:
    act: str
    gate_up: Weight
    down: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        return ops.linear(ops.gated(ops.linear(x, self.gate_up), self.act), self.down)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """One that a token takes as much of as a gate says."""

    mlp: Mlp
    gate: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        return ops.gate_by(self.mlp(ops, x), ops.linear(x, self.gate))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts, and an MLP beside them where there is one."""

    spec: ExpertSpec
    router: Weight
    bank: Weight
    shared: Mlp | GatedMlp | None

    def __call__(self, ops: Ops[V], x: V) -> V:
        y = ops.experts(x, ops.linear(x, self.router), self.bank, self.spec)
        return ops.add(self.shared(ops, x), y) if self.shared else y


@dataclass(frozen=True, slots=True)
class Ends:
    """Before the layers and after them."""

    spec: ModelSpec
    embed: Weight
    norm: Weight
    head: Weight

    def enter(self, ops: Ops[V]) -> V:
        return scaled(ops, ops.embed(self.embed), self.spec.embed_scale)

    def leave(self, ops: Ops[V], x: V, residual: V | None) -> V:
        """Logits of the sampled rows: [S, vocab]."""
        x, _ = ops.add_norm(x, residual, self.norm, self.spec.eps)
        ops.pool(x)
        logits = ops.linear(scaled(ops, ops.take_sampled(x), self.spec.logit_scale), self.head)
        return ops.soft_cap(logits, self.spec.logit_cap) if self.spec.logit_cap else logits


def scaled(ops: Ops[V], x: V, factor: float) -> V:
    return x if factor == 1 else ops.scale(x, factor)


def attention(spec: ModelSpec, pack: Packer, layer: int) -> Attention:
    a, name = spec.attention(layer), f"layers.{layer}"
    qkv = pack.matrix((f"{name}.q", a.q_width), (f"{name}.k", a.kv_width), (f"{name}.v", a.kv_width), width=spec.dim)
    o = pack.matrix((f"{name}.o", spec.dim), width=a.q_width)
    sinks = pack.vector(f"{name}.sinks", a.heads) if a.sinks else None
    if not a.qk_norm:
        return Attention(layer, a, spec.eps, qkv, o, norms=None, sinks=sinks)
    q_run, k_run = (a.head_dim, a.head_dim) if a.qk_norm == "head" else (a.q_width, a.kv_width)
    norms = (
        pack.vector(f"{name}.q_norm", q_run, spec.gain_offset),
        pack.vector(f"{name}.k_norm", k_run, spec.gain_offset),
    )
    return Attention(layer, a, spec.eps, qkv, o, norms, sinks)


def mlp(spec: ModelSpec, pack: Packer, layer: int) -> Mlp:
    return gated_mlp(spec, pack, f"layers.{layer}", spec.hidden)


def mlp_or_experts(spec: ModelSpec, pack: Packer, layer: int) -> Mlp | Mixture:
    """What the layer has."""
    if spec.experts is None or layer in spec.dense:
        return mlp(spec, pack, layer)
    name = f"layers.{layer}"
    router = pack.matrix((f"{name}.router", spec.experts.count), width=spec.dim)
    bank = pack.experts(name, spec.experts, spec.dim)
    return Mixture(spec.experts, router, bank, shared_mlp(spec, pack, f"{name}.shared"))


def shared_mlp(spec: ModelSpec, pack: Packer, name: str) -> Mlp | GatedMlp | None:
    if not spec.shared_hidden:
        return None
    mlp = gated_mlp(spec, pack, name, spec.shared_hidden)
    return GatedMlp(mlp, pack.matrix((f"{name}.router", 1), width=spec.dim)) if spec.shared_gated else mlp


def gated_mlp(spec: ModelSpec, pack: Packer, name: str, hidden: int) -> Mlp:
    gate_up = pack.matrix((f"{name}.gate", hidden), (f"{name}.up", hidden), width=spec.dim)
    return Mlp(spec.act, gate_up, down=pack.matrix((f"{name}.down", spec.dim), width=hidden))


def norm(spec: ModelSpec, pack: Packer, layer: int, name: str) -> Weight:
    return pack.vector(f"layers.{layer}.{name}", spec.dim, spec.gain_offset)


def ends(spec: ModelSpec, pack: Packer) -> Ends:
    embed = pack.matrix(("embed", spec.vocab), width=spec.dim)
    head = embed if spec.tied else pack.matrix(("head", spec.vocab), width=spec.dim)
    return Ends(spec, embed, pack.vector("norm", spec.dim, spec.gain_offset), head)
