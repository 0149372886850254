"""Reads Qwen2-MoE: Qwen2 with experts in all or some layers, and a gated shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import llama
from penstock.model.families.qwen2 import BIASES
from penstock.model.families.qwen3moe import read_dense
from penstock.model.families.qwen3next import SHARED
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ExpertSpec, ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(**names.EXPERTS).but(**SHARED)
GGUF = names.GGUF.but(**{"shared.router": "ffn_gate_inp_shexp"})
SHARED_SIZE = "expert_shared_feed_forward_length"
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    spec = config_hf.read_decoder(config, "qwen2moe")
    biases = BIASES if config.flag("qkv_bias", True) else frozenset()
    experts = config_hf.read_experts(config, spec, count="num_experts", hidden="moe_intermediate_size")
    experts = replace(experts, renormalize=config.flag("norm_topk_prob", False))
    spec = replace(spec, biases=biases, dense=frozenset(read_dense(config, spec.layers)))
    return with_lower_windows(config, with_experts(spec, experts, config.size("shared_expert_intermediate_size")))


def with_lower_windows(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """Returns the spec with a window in every other layer before `max_window_layers`, if enabled."""
    used = config.flag("use_sliding_window", False)
    most = config.number("max_window_layers", 28, least=0)
    otherwise = [used and layer % 2 == 0 and layer < most for layer in range(spec.layers)]
    sliding = config_hf.read_sliding(config, otherwise)
    if not used:
        config.ignore("sliding_window")
        return spec
    return spec.with_windows(sliding, config_hf.read_window(config, 4096))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(config, tensors, "qwen2moe", interleaved=False, keys=(SHARED_SIZE,), experts=True)
    experts = gguf_config.read_experts(config, spec, renormalize=False)
    return with_experts(spec, experts, config.size(SHARED_SIZE, spec.hidden))


def with_experts(spec: ModelSpec, experts: ExpertSpec, shared: int) -> ModelSpec:
    return replace(spec, experts=experts, shared_hidden=shared, shared_gated=True)
