"""Reads Granite: Llama with multipliers of embeddings, scores, residual additions and logits.

The residual stream is always normed before use, so a residual multiplier m equals an embedding multiplier 1 / m with an
epsilon of eps / m^2, and layers are computed as in Llama.
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

HUGGING_FACE = names.HUGGING_FACE
GGUF = names.GGUF
KEYS = ("attention.scale", "embedding_scale", "logit_scale", "residual_scale")
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    return multiplied(
        replace(config_hf.read_decoder(config, "granite"), biases=config_hf.read_biases(config)),
        embedding=config.number("embedding_multiplier", 1.0),
        residual=config.number("residual_multiplier", 1.0),
        attention=config.number("attention_multiplier", 1.0),
        logits=1 / config.number("logits_scaling", 1.0),
    )


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(config, tensors, "granite", interleaved=True, keys=KEYS)
    return read_scales(config, spec)


def read_scales(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    return multiplied(
        spec,
        embedding=config.number("embedding_scale", 1.0),
        residual=config.number("residual_scale", 1.0),
        attention=config.number("attention.scale", spec.attn.scale),
        logits=1 / config.number("logit_scale", 1.0),
    )


def multiplied(spec: ModelSpec, embedding: float, residual: float, attention: float, logits: float) -> ModelSpec:
    return replace(
        spec,
        eps=spec.eps / residual**2,
        attn=replace(spec.attn, multiplier=attention),
        embed_scale=embedding / residual,
        logit_scale=logits,
    )
