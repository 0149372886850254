"""Reads dots.llm1: Qwen3's attention and GLM-4.5's experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import glm4moe, llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = glm4moe.HUGGING_FACE
GGUF = names.GGUF.but(q_norm="attn_q_norm", k_norm="attn_k_norm")
KEYS = ("expert_shared_count", "leading_dense_block_count")
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    config.require("moe_layer_freq", (1,), 1)
    config.require("scoring_func", ("noaux_tc", "sigmoid"), "sigmoid")
    spec = config_hf.read_decoder(config, "dots1")
    spec = replace(spec, biases=config_hf.read_biases(config))
    window, first = config_hf.read_window(config, 4096), config.number("max_window_layers", 62, least=0)
    sliding = config_hf.read_sliding(config, [window > 0 and layer >= first for layer in range(spec.layers)])
    spec = glm4moe.with_experts(
        spec,
        glm4moe.read_experts(config, spec, renormalize=False),
        dense=config.count("first_k_dense_replace", 0),
        shared=config.size("n_shared_experts"),
        normed=True,
    )
    return spec.with_windows(sliding, window)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(config, tensors, "dots1", interleaved=False, keys=KEYS, experts=True)
    return glm4moe.with_experts(
        spec,
        gguf_config.read_experts(config, spec, scoring=2, renormalize=False),
        dense=config.count("leading_dense_block_count", 0),
        shared=config.size("expert_shared_count"),
        normed=True,
    )
