"""The Llama family: Llama 2 and 3, SmolLM2, Mistral and whatever else is shaped like them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.ops import Ops, V, Weight
from penstock.model.spec import ModelSpec
from penstock.model.weights import Packer


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Weight
    qkv: Weight
    o: Weight
    mlp_norm: Weight
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class Llama:
    spec: ModelSpec
    embed: Weight
    layers: tuple[Layer, ...]
    norm: Weight
    head: Weight

    def forward(self, ops: Ops[V]) -> V:
        """Logits of the sampled rows: [S, vocab]."""
        s = self.spec
        x, residual = ops.embed(self.embed), None
        for i, layer in enumerate(self.layers):
            x, residual = ops.add_norm(x, residual, layer.attn_norm, s.eps)
            x = ops.linear(ops.attend(i, ops.linear(x, layer.qkv), s.attn), layer.o)
            x, residual = ops.add_norm(x, residual, layer.mlp_norm, s.eps)
            x = ops.linear(ops.gated(ops.linear(x, layer.gate_up), s.act), layer.down)
        x, _ = ops.add_norm(x, residual, self.norm, s.eps)
        ops.pool(x)
        return ops.linear(ops.take_sampled(x), self.head)


def build(spec: ModelSpec, pack: Packer) -> Llama:
    """Takes every weight of the checkpoint by its canonical name (model/names.py) through the packer."""
    s, a = spec, spec.attn
    layers = tuple(
        Layer(
            attn_norm=pack.vector(f"layers.{i}.attn_norm", s.dim),
            qkv=pack.matrix(
                (f"layers.{i}.q", a.q_width), (f"layers.{i}.k", a.kv_width), (f"layers.{i}.v", a.kv_width), width=s.dim
            ),
            o=pack.matrix((f"layers.{i}.o", s.dim), width=a.q_width),
            mlp_norm=pack.vector(f"layers.{i}.mlp_norm", s.dim),
            gate_up=pack.matrix((f"layers.{i}.gate", s.hidden), (f"layers.{i}.up", s.hidden), width=s.dim),
            down=pack.matrix((f"layers.{i}.down", s.dim), width=s.hidden),
        )
        for i in range(s.layers)
    )
    embed = pack.matrix(("embed", s.vocab), width=s.dim)
    head = embed if s.tied else pack.matrix(("head", s.vocab), width=s.dim)
    return Llama(spec, embed, layers, pack.vector("norm", s.dim), head)
