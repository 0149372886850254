"""Reads ERNIE 4.5, dense or with experts: Llama with RoPE on neighbouring pairs. A bias helps to select experts. The
multi-token prediction (MTP) layers are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import MAX_LAYERS, ConfigReader, size_or_all
from penstock.model.families import llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ExpertSpec, ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(
    **(names.EXPERTS | {"choice_bias": "mlp.moe_statics.e_score_correction_bias"})
)._replace(ignored=re.compile(rf"{names.HUGGING_FACE.ignored.pattern}|model\.mtp_.+"))
GGUF = names.GGUF
BIASES = frozenset(("q", "k", "v", "o", "gate", "up", "down"))
SHARED_SIZE = "expert_shared_feed_forward_length"
KEYS = (SHARED_SIZE, "expert_shared_count", "interleave_moe_layer_step", "leading_dense_block_count")
NEUTRAL = ("moe_capacity", "num_nextn_predict_layers")  # training options, and omitted parts
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    config.number("rms_norm_eps")  # required: the default differs from other families
    config.size("num_key_value_heads")
    experts = config.strings("architectures") == ["Ernie4_5_MoeForCausalLM"]
    if not experts:
        config.size("head_dim")
    spec = config_hf.read_decoder(config, "ernie45", tied=True, theta=500000.0)
    rotation = replace(spec.attn.rope, interleaved=True)
    spec = replace(spec, attn=replace(spec.attn, rope=rotation))
    if experts:
        return read_experts(config, spec)
    return replace(spec, biases=BIASES if config.flag("use_bias", False) else frozenset())


def read_experts(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    config.require("use_bias", (False,), False)
    config.require("moe_norm_min", (1e-12,), 1e-12)
    config.ignore(*NEUTRAL)
    experts = config_hf.read_experts(
        config, spec, count="moe_num_experts", hidden="moe_intermediate_size", top_k="moe_k"
    )
    last = size_or_all(config, "moe_layer_end_index", -1) or spec.layers - 1
    step, first = config.size("moe_layer_interval", 1), config.count("moe_layer_start_index", 1)
    shared = config.count("moe_num_shared_experts", 2) * experts.hidden
    return with_experts(replace(spec, biases=frozenset()), experts, range(first, last + 1), step, shared)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(config, tensors, "ernie45", interleaved=True, keys=KEYS, experts=True)
    if not config.count("expert_count", 0):
        return spec
    experts = gguf_config.read_experts(config, spec)
    first = config.count("leading_dense_block_count", 0, most=MAX_LAYERS)
    step = config.size("interleave_moe_layer_step", 1)
    shared = config.size(SHARED_SIZE) if config.count("expert_shared_count", 0) else 0
    return with_experts(spec, experts, range(first, spec.layers), step, shared)


def with_experts(spec: ModelSpec, experts: ExpertSpec, layers: range, step: int, shared: int) -> ModelSpec:
    """Returns the spec with experts in every `step`-th of these layers."""
    return replace(
        spec,
        experts=replace(experts, renormalize=True, choice_bias=True),
        dense=frozenset(layer for layer in range(spec.layers) if layer not in layers or (layer + 1) % step),
        shared_hidden=shared,
    )
