"""Reads Jamba: Mamba layers with norms on time steps, B and C, attention without RoPE every few layers, and experts
every few layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from penstock.errors import UnsupportedModel
from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import ConfigReader, size_or_auto
from penstock.model.families import mamba_layer
from penstock.model.gguf import config as gguf_config
from penstock.model.packer import Packer
from penstock.model.recurrence import MambaSpec
from penstock.model.spec import ExpertSpec, ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(
    mlp_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router",
    **{ours: theirs.replace("mlp.", "feed_forward.") for ours, theirs in names.EXPERTS.items() if "experts.*" in ours},
    **{ours: f"mamba.{theirs}" for ours, theirs in mamba_layer.HUGGING_FACE_PARTS.items()},
    **{f"{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
)._replace(top={"model.embed_tokens": "embed", "model.final_layernorm": "norm", "lm_head": "head"})
GGUF = names.GGUF.but(**mamba_layer.GGUF_PARTS, **{f"{part}_norm": f"ssm_{part}_norm" for part in ("dt", "b", "c")})
DEPLOYMENT = ("calc_logits_for_entire_prompt", "num_logits_to_keep", "use_associative_scan", "use_mamba_kernels")


def mixer(spec: ModelSpec, pack: Packer, layer: int) -> decoder.Part:
    made = mamba_layer.mamba_layer if layer in spec.recurrent else decoder.attention
    return made(spec, pack, layer)


build = partial(decoder.build, mixer=mixer)


def read_hf(config: ConfigReader) -> ModelSpec:
    config.ignore(*DEPLOYMENT, "use_mambapy")
    if "sliding_window" in config:
        raise config.unsupported("sliding_window", config.size("sliding_window"), ("null",))
    spec = config_hf.read_decoder(config, "jamba", acts={"silu": "silu"})
    mamba = mamba_layer.mamba_spec(
        config.size("mamba_expand", 2) * spec.dim,
        config.size("mamba_d_conv", 4),
        config.size("mamba_d_state", 16),
        size_or_auto(config, "mamba_dt_rank", -(-spec.dim // 16)),
    )
    experts = config_hf.read_experts(config, spec, count="num_experts", hidden="intermediate_size")
    attentive = every(config, "attn_layer", 8, 4, spec.layers)
    sparse = every(config, "expert_layer", 2, 1, spec.layers)
    conv = ("conv",) if config.flag("mamba_conv_bias", True) else ()
    projections = ("ssm_in", "ssm_out") if config.flag("mamba_proj_bias", False) else ()
    spec = replace(spec, biases=frozenset(("ssm_dt", *conv, *projections)))
    return in_layers(spec, mamba, attentive, experts, sparse)


def every(config: ConfigReader, name: str, period: int, offset: int, layers: int) -> Sequence[bool]:
    each = config.size(f"{name}_period", period)
    first = config.count(f"{name}_offset", offset, most=each - 1)
    return [layer % each == first for layer in range(layers)]


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    scalar, attentive = gguf_config.read_attentive(config)
    keys = mamba_layer.GGUF_KEYS
    spec = gguf_config.read_decoder(scalar, tensors, "jamba", interleaved=False, keys=keys, experts=True)
    spec = replace(spec, biases=frozenset(("ssm_dt", "conv")))
    sizes = ("ssm.inner_size", "ssm.conv_kernel", "ssm.state_size", "ssm.time_step_rank")
    mamba = mamba_layer.mamba_spec(*(config.size(key) for key in sizes))
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in tensors for layer in range(spec.layers)]
    experts = gguf_config.read_experts(config, spec, renormalize=False) if any(sparse) else None
    return in_layers(spec, mamba, attentive, experts, sparse)


def in_layers(
    spec: ModelSpec, mamba: MambaSpec, attentive: Sequence[bool], experts: ExpertSpec | None, sparse: Sequence[bool]
) -> ModelSpec:
    if not any(attentive):
        raise UnsupportedModel("no layer of this model has attention; a model needs one layer that has it")
    several = experts is not None and experts.count > 1 and any(sparse)
    return replace(
        spec,
        attn=replace(spec.attn, rope=RopeSpec((), interleaved=False)),
        recurrence=mamba,
        recurrent=frozenset(layer for layer, one in enumerate(attentive) if not one),
        experts=experts if several else None,
        dense=frozenset(layer for layer, one in enumerate(sparse) if several and not one),
    )
