"""Reads GLM-4 (9B, 2024) and GLM-Edge: Llama with biases for q, k and v, fused gate and up, and RoPE on neighbouring
pairs in part of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(gate_up="mlp.gate_up_proj")
GGUF = names.GGUF.but(qkv="attn_qkv", gate_up="ffn_up")
ROTATED_SHARE = "partial_rotary_factor"
BIASES = frozenset(("q", "k", "v"))
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    return read_as("glm", config)


def read_as(arch: str, config: ConfigReader) -> ModelSpec:
    for key in ("rms_norm_eps", "num_key_value_heads", "head_dim"):
        config.number(key)  # required: the default differs from other families
    spec = config_hf.read_decoder(config, arch, partial=True)
    if ROTATED_SHARE not in config_hf.rope_fields(config):
        config.number(ROTATED_SHARE)
    rope = replace(spec.attn.rope, interleaved=True)
    biases = BIASES if config.flag("attention_bias", True) else frozenset()
    return replace(spec, attn=replace(spec.attn, rope=rope), biases=biases)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    return gguf_config.read_decoder(config, tensors, "glm", interleaved=True, partial=True)
