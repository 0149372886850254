"""Reads OLMoE: Llama with experts, and norms over all of q and all of k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import llama
from penstock.model.families.olmo2 import normed
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(**names.EXPERTS, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
GGUF = names.GGUF.but(q_norm="attn_q_norm", k_norm="attn_k_norm")
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    config.number("rms_norm_eps")  # required: the default differs from other families
    spec = config_hf.read_decoder(config, "olmoe")
    experts = config_hf.read_experts(config, spec, count="num_experts", hidden="intermediate_size")
    experts = replace(experts, renormalize=config.flag("norm_topk_prob", False))
    return normed(replace(spec, biases=config_hf.read_biases(config), experts=experts))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(config, tensors, "olmoe", interleaved=False, experts=True)
    return normed(replace(spec, experts=gguf_config.read_experts(config, spec, renormalize=False)))
