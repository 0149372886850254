"""Reads GLM-4-0414: GLM-4 with norms both before and after attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.model.config_reader import ConfigReader
from penstock.model.families import gemma2, glm
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = glm.HUGGING_FACE.but(
    after_attn_norm="post_self_attn_layernorm",
    after_mlp_norm="post_mlp_layernorm",
)
GGUF = glm.GGUF.but(after_attn_norm="post_attention_norm", after_mlp_norm="post_ffw_norm")
build = gemma2.build


def read_hf(config: ConfigReader) -> ModelSpec:
    return glm.read_as("glm4", config)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    return gguf_config.read_decoder(config, tensors, "glm4", interleaved=True, partial=True)
