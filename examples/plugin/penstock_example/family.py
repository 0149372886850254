"""Reads Tidy, an imaginary family: Llama whose logits are scaled."""

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
GGUF = names.GGUF
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    scale = config.number("logit_scale", 0.5)
    return replace(config_hf.read_decoder(config, "tidy"), logit_scale=scale)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    scale = config.number("logit_scale", 0.5)
    return replace(gguf_config.read_decoder(config, tensors, "tidy", interleaved=False), logit_scale=scale)
