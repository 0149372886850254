"""Reads and builds hybrid models: most layers are gated delta nets with a fixed-size state; every few layers have gated
attention.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from penstock.model import config_hf, decoder
from penstock.model.config_reader import FLAGS, ConfigReader
from penstock.model.gguf import config as gguf_config
from penstock.model.low_rank import Spans
from penstock.model.ops import DeltaInputs, DeltaWeights, Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.recurrence import DeltaSpec
from penstock.model.spec import ExpertSpec, ModelSpec

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
class DeltaNet:
    """Computes a gated delta net with its projections."""

    layer: int  # index among layers with a state
    spec: DeltaSpec
    eps: float
    qkvz: Weight
    ba: Weight
    weights: DeltaWeights
    o: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        qkvz, ba = ops.linear(x, self.qkvz), ops.linear(x, self.ba)
        inputs = DeltaInputs(qkvz, qkvz, ba, ba)
        return ops.linear(ops.delta_net(self.layer, inputs, self.weights, self.spec, self.eps), self.o)


def mixer(spec: ModelSpec, pack: Packer, layer: int) -> decoder.Part:
    return delta_net(spec, pack, layer) if layer in spec.recurrent else decoder.attention(spec, pack, layer)


def delta_net(spec: ModelSpec, pack: Packer, layer: int) -> DeltaNet:
    d, name = spec.recurrence, f"layers.{layer}"
    assert isinstance(d, DeltaSpec)
    weights = DeltaWeights(
        conv=pack.vector(f"{name}.conv", d.width * d.conv_width),
        decay=decay(d, pack, name),
        dt_bias=pack.vector(f"{name}.dt", d.v_heads),
        gain=pack.vector(f"{name}.delta_norm", d.v_dim),
    )
    return DeltaNet(
        layer=spec.state_layer(layer),
        spec=d,
        eps=spec.eps,
        qkvz=pack.matrix(*projections(d, name, pack), width=spec.dim),
        ba=pack.matrix(*gates(d, name, pack), width=spec.dim),
        weights=weights,
        o=pack.matrix((f"{name}.delta_o", spec.dim), width=d.v_width),
    )


def decay(d: DeltaSpec, pack: Packer, name: str) -> Weight:
    """Packs the decay of each head's state. Some files store its logarithm."""
    if pack.has(f"{name}.decay"):
        return pack.vector(f"{name}.decay", d.v_heads)
    return pack.computed(f"{name}.decay_log", d.v_heads, lambda log: -np.exp(log))


def projections(d: DeltaSpec, name: str, pack: Packer) -> list[tuple[str, int] | tuple[str, int, Spans]]:
    """Returns the row spans of q, k, v and z, which some files interleave by key head."""
    if not pack.has(f"{name}.delta_qkvz"):
        return [(f"{name}.delta_qkv", d.width), (f"{name}.delta_z", d.v_width)]
    shared = d.v_heads // d.k_heads * d.v_dim
    kinds = decoder.alternating(d.k_heads, d.k_dim, d.k_dim, shared, shared)
    return [(f"{name}.delta_qkvz", d.width + d.v_width, [span for kind in kinds for span in kind])]


def gates(d: DeltaSpec, name: str, pack: Packer) -> list[tuple[str, int] | tuple[str, int, Spans]]:
    if not pack.has(f"{name}.delta_ba"):
        return [(f"{name}.delta_b", d.v_heads), (f"{name}.delta_a", d.v_heads)]
    shared = d.v_heads // d.k_heads
    beta, alpha = decoder.alternating(d.k_heads, shared, shared)
    return [(f"{name}.delta_ba", 2 * d.v_heads, [*beta, *alpha])]


build = partial(decoder.build, mixer=mixer)


# ---- configs ----


def read_hf(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    config.size("head_dim")  # required: the default is not the width divided by the heads
    config.require("attention_bias", (False,), False)
    config.require("attn_output_gate", (True,), True)
    config.require("output_gate_type", ("swish", "silu"), "swish")
    config.require("mamba_ssm_dtype", ("float32",), "float32")
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    delta = DeltaSpec(
        config.size("linear_num_key_heads"),
        config.size("linear_num_value_heads"),
        config.size("linear_key_head_dim"),
        config.size("linear_value_head_dim"),
        config.size("linear_conv_kernel_dim"),
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
    heads, dim = (config.size("ssm.group_count"), config.size("ssm.time_step_rank")), config.size("ssm.state_size")
    delta = DeltaSpec(*heads, dim, dim, config.size("ssm.conv_kernel"), tiled)
    config.require("ssm.inner_size", (delta.v_width,))
    each = config.size("full_attention_interval", 4)
    recurrent: Sequence[bool] = [(i + 1) % each != 0 for i in range(spec.layers)]
    if "attention.recurrent_layers" in config:
        recurrent = config.array("attention.recurrent_layers", FLAGS, spec.layers + unused)[: spec.layers]
    return in_layers(spec, delta, recurrent)


def read_gguf_experts(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    shared = config.size("expert_shared_feed_forward_length")
    return with_experts(spec, gguf_config.read_experts(config, spec), shared)


def in_layers(spec: ModelSpec, delta: DeltaSpec, recurrent: Collection[bool]) -> ModelSpec:
    attn = replace(spec.attn, qk_norm="head", output_gate=True)
    return replace(
        spec,
        attn=attn,
        recurrence=delta,
        recurrent=frozenset(i for i, one in enumerate(recurrent) if one),
        biases=frozenset(),
    )
