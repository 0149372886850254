"""Reads Gemma 1: Llama with GELU, scaled embeddings, and norm gains stored minus one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import gemma2, llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE
GGUF = names.GGUF
TANH = "gelu_pytorch_tanh"
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    config.size("head_dim")  # required: the default is 256, not the width divided by the heads
    config.require("hidden_act", ("gelu", TANH), TANH)  # published configs say "gelu" and mean the approximation
    config.require("hidden_activation", (TANH,), TANH)
    config.require("use_bidirectional_attention", (False,), False)
    spec = config_hf.read_decoder(config, "gemma", tied=True, act_key="hidden_activation")
    return replace(gemma2.scaled(spec), gain_offset=1.0, biases=config_hf.read_biases(config))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    return gemma2.scaled(gguf_config.read_decoder(config, tensors, "gemma", interleaved=False))
