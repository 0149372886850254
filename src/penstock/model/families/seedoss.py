"""Reads Seed-OSS: Llama with biases for q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE
GGUF = names.GGUF.but(mlp_norm="post_attention_norm")
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    config.size("head_dim")  # required: the default is 128, not the width divided by the heads
    config.ignore("residual_dropout")
    attention = {"q", "k", "v"} if config.flag("attention_bias", True) else set()
    out = {"o"} if config.flag("attention_out_bias", False) else set()
    mlp = {"gate", "up", "down"} if config.flag("mlp_bias", False) else set()
    return replace(config_hf.read_decoder(config, "seedoss"), biases=frozenset(attention | out | mlp))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    return gguf_config.read_decoder(config, tensors, "seedoss", interleaved=False)
