"""Reads Granite's MoE models: Granite's multipliers and, in some models, a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import granite, llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(
    **{
        "router": "block_sparse_moe.router.layer",
        "experts.gate_up": "block_sparse_moe.input_linear",
        "experts.down": "block_sparse_moe.output_linear",
        "shared.gate_up": "shared_mlp.input_linear",
        "shared.down": "shared_mlp.output_linear",
    }
)
GGUF = names.GGUF
SHARED_SIZE = "expert_shared_feed_forward_length"
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    spec = replace(granite.read_hf(config), arch="granitemoe")
    experts = config_hf.read_experts(config, spec, count="num_local_experts", hidden="intermediate_size")
    shared = config.count("shared_intermediate_size", 0)
    return replace(spec, experts=replace(experts, renormalize=True), shared_hidden=shared)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    keys = (*granite.KEYS, SHARED_SIZE)
    spec = gguf_config.read_decoder(config, tensors, "granitemoe", interleaved=True, keys=keys, experts=True)
    experts = gguf_config.read_experts(config, spec)
    shared = config.count(SHARED_SIZE, 0)
    return granite.read_scales(config, replace(spec, experts=experts, shared_hidden=shared))
