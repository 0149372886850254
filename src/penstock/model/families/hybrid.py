"""What hybrid models are made of: most layers have a gated delta net, which gathers all that it has seen in a state of
one size; each few layers there is attention, whose output is gated.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.model import config_hf, decoder
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf import config as gguf_config
from penstock.model.ops import DeltaWeights, Ops, V, Weight
from penstock.model.spec import AttentionSpec, DeltaSpec, ExpertSpec, ModelSpec
from penstock.model.weights import Packer, Spans

LINEAR, FULL = "linear_attention", "full_attention"
GGUF_KEYS = (
    "attention.recurrent_layers",
    "expert_shared_feed_forward_length",
    "full_attention_interval",
    "nextn_predict_layers",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
)


@dataclass(frozen=True, slots=True)
class GatedAttention:
    layer: int  # among those that attend
    spec: AttentionSpec
    eps: float
    qkv: Weight
    gate: Weight
    norms: tuple[Weight, Weight]
    o: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        qkv = ops.norm_qk(ops.linear(x, self.qkv), *self.norms, self.spec, self.eps)
        y = ops.attend(self.layer, qkv, self.spec)
        return ops.linear(ops.gate_by(y, ops.linear(x, self.gate)), self.o)


@dataclass(frozen=True, slots=True)
class DeltaNet:
    layer: int  # among those that have one
    spec: DeltaSpec
    eps: float
    qkvz: Weight
    ba: Weight
    weights: DeltaWeights
    o: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        qkvz, ba = ops.linear(x, self.qkvz), ops.linear(x, self.ba)
        return ops.linear(ops.delta_net(self.layer, qkvz, ba, self.weights, self.spec, self.eps), self.o)


@dataclass(frozen=True, slots=True)
class Layer:
    mixer_norm: Weight
    mixer: GatedAttention | DeltaNet
    mlp_norm: Weight
    mlp: decoder.Mlp | decoder.Mixture


@dataclass(frozen=True, slots=True)
class Hybrid:
    spec: ModelSpec
    layers: tuple[Layer, ...]
    ends: decoder.Ends

    def forward(self, ops: Ops[V]) -> V:
        eps = self.spec.eps
        x, residual = self.ends.enter(ops), None
        for layer in self.layers:
            x, residual = ops.add_norm(x, residual, layer.mixer_norm, eps)
            x = layer.mixer(ops, x)
            x, residual = ops.add_norm(x, residual, layer.mlp_norm, eps)
            x = layer.mlp(ops, x)
        return self.ends.leave(ops, x, residual)


def build(spec: ModelSpec, pack: Packer) -> Hybrid:
    layers = tuple(
        Layer(
            mixer_norm=decoder.norm(spec, pack, i, "attn_norm"),
            mixer=delta_net(spec, pack, i) if i in spec.recurrent else gated_attention(spec, pack, i),
            mlp_norm=decoder.norm(spec, pack, i, "mlp_norm"),
            mlp=decoder.mlp_or_experts(spec, pack, i),
        )
        for i in range(spec.layers)
    )
    return Hybrid(spec, layers, decoder.ends(spec, pack))


def gated_attention(spec: ModelSpec, pack: Packer, layer: int) -> GatedAttention:
    """The tensor of q has each head's queries and then its gate."""
    a, name = spec.attn, f"layers.{layer}"
    queries, gates = alternating(a.heads, a.head_dim, a.head_dim)
    return GatedAttention(
        layer=layer - sum(i < layer for i in spec.recurrent),
        spec=a,
        eps=spec.eps,
        qkv=pack.matrix(
            (f"{name}.q", 2 * a.q_width, queries),
            (f"{name}.k", a.kv_width),
            (f"{name}.v", a.kv_width),
            width=spec.dim,
        ),
        gate=pack.matrix((f"{name}.q", 2 * a.q_width, gates), width=spec.dim),
        norms=(
            pack.vector(f"{name}.q_norm", a.head_dim, spec.gain_offset),
            pack.vector(f"{name}.k_norm", a.head_dim, spec.gain_offset),
        ),
        o=pack.matrix((f"{name}.o", spec.dim), width=a.q_width),
    )


def delta_net(spec: ModelSpec, pack: Packer, layer: int) -> DeltaNet:
    d, name = spec.delta, f"layers.{layer}"
    assert d is not None
    weights = DeltaWeights(
        conv=pack.vector(f"{name}.conv", d.width * d.taps),
        decay=decay(d, pack, name),
        dt=pack.vector(f"{name}.dt", d.v_heads),
        gain=pack.vector(f"{name}.delta_norm", d.v_dim),
    )
    return DeltaNet(
        layer=sum(i < layer for i in spec.recurrent),
        spec=d,
        eps=spec.eps,
        qkvz=pack.matrix(*projections(d, name, pack), width=spec.dim),
        ba=pack.matrix(*gates(d, name, pack), width=spec.dim),
        weights=weights,
        o=pack.matrix((f"{name}.delta_o", spec.dim), width=d.v_width),
    )


def decay(d: DeltaSpec, pack: Packer, name: str) -> Weight:
    """Some files have its logarithm."""
    if pack.has(f"{name}.decay"):
        return pack.vector(f"{name}.decay", d.v_heads)
    return pack.computed(f"{name}.decay_log", d.v_heads, lambda log: -np.exp(log))


def projections(d: DeltaSpec, name: str, pack: Packer) -> list[tuple[str, int] | tuple[str, int, Spans]]:
    """Some files have them for one key head after the other."""
    if not pack.has(f"{name}.delta_qkvz"):
        return [(f"{name}.delta_qkv", d.width), (f"{name}.delta_z", d.v_width)]
    shared = d.v_heads // d.k_heads * d.v_dim
    kinds = alternating(d.k_heads, d.k_dim, d.k_dim, shared, shared)
    return [(f"{name}.delta_qkvz", d.width + d.v_width, [span for kind in kinds for span in kind])]


def gates(d: DeltaSpec, name: str, pack: Packer) -> list[tuple[str, int] | tuple[str, int, Spans]]:
    if not pack.has(f"{name}.delta_ba"):
        return [(f"{name}.delta_b", d.v_heads), (f"{name}.delta_a", d.v_heads)]
    shared = d.v_heads // d.k_heads
    beta, alpha = alternating(d.k_heads, shared, shared)
    return [(f"{name}.delta_ba", 2 * d.v_heads, [*beta, *alpha])]


def alternating(groups: int, *sizes: int) -> list[list[tuple[int, int]]]:
    """Of rows that come in equal groups of several kinds: where the rows of each kind are."""
    starts = [sum(sizes[:kind]) for kind in range(len(sizes))]
    return [
        [(group * sum(sizes) + start, group * sum(sizes) + start + size) for group in range(groups)]
        for start, size in zip(starts, sizes, strict=True)
    ]


# -- configs -----------------------------------------------------------------------------------------------------


def read_hf(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """What is said of layers and heads in config.json, beside what all say."""
    config.size("head_dim")  # silence would not mean a share of the width
    config.require("attention_bias", (False,), False)
    config.require("attn_output_gate", (True,), True)
    config.require("output_gate_type", ("swish", "silu"), "swish")
    config.require("mamba_ssm_dtype", ("float32",), "float32")
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    delta = DeltaSpec(
        k_heads=config.size("linear_num_key_heads"),
        v_heads=config.size("linear_num_value_heads"),
        k_dim=config.size("linear_key_head_dim"),
        v_dim=config.size("linear_value_head_dim"),
        taps=config.size("linear_conv_kernel_dim"),
    )
    each = config.size("full_attention_interval", 4)
    kinds = [FULL if (i + 1) % each == 0 else LINEAR for i in range(spec.layers)]
    if "layer_types" in config:
        kinds = config.strings("layer_types")
    if len(kinds) != spec.layers or not {LINEAR, FULL}.issuperset(kinds):
        raise config.unsupported("layer_types", kinds, (f"{LINEAR} or {FULL} for each layer",))
    return in_layers(replace(spec, gain_offset=1.0), delta, [kind == LINEAR for kind in kinds])


def read_experts(config: ConfigReader, spec: ModelSpec, renormalize: bool) -> ModelSpec:
    config.require("decoder_sparse_step", (1,), 1)
    config.require("mlp_only_layers", ([],), [])
    experts = config_hf.read_experts(config, spec, count="num_experts", hidden="moe_intermediate_size")
    return with_experts(spec, replace(experts, renormalize=renormalize), config.size("shared_expert_intermediate_size"))


def with_experts(spec: ModelSpec, experts: ExpertSpec, shared: int) -> ModelSpec:
    return replace(spec, experts=experts, shared_hidden=shared, shared_gated=True)


def read_gguf(config: ConfigReader, spec: ModelSpec, tiled: bool) -> ModelSpec:
    unused = int(config.number("nextn_predict_layers", 0, least=0))
    spec = replace(spec, layers=spec.layers - unused, unused_layers=unused)
    delta = DeltaSpec(
        k_heads=config.size("ssm.group_count"),
        v_heads=config.size("ssm.time_step_rank"),
        k_dim=config.size("ssm.state_size"),
        v_dim=config.size("ssm.state_size"),
        taps=config.size("ssm.conv_kernel"),
        tiled=tiled,
    )
    config.require("ssm.inner_size", (delta.v_width,))
    each = config.size("full_attention_interval", 4)
    recurrent: Sequence[bool] = [(i + 1) % each != 0 for i in range(spec.layers)]
    if "attention.recurrent_layers" in config:
        recurrent = config.flags("attention.recurrent_layers", spec.layers + unused)[: spec.layers]
    return in_layers(spec, delta, recurrent)


def read_gguf_experts(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    shared = config.size("expert_shared_feed_forward_length")
    return with_experts(spec, gguf_config.read_experts(config, spec), shared)


def in_layers(spec: ModelSpec, delta: DeltaSpec, recurrent: Collection[bool]) -> ModelSpec:
    attn = replace(spec.attn, qk_norm="head")
    return replace(
        spec,
        attn=attn,
        delta=delta,
        recurrent=frozenset(i for i, one in enumerate(recurrent) if one),
        biases=frozenset(),
    )
