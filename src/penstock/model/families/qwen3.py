"""Reads Qwen3 and the text part of Qwen3-VL: Llama with norms of each head's queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import llama
from penstock.model.families.qwen2 import with_upper_windows
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.beside_vision(names.HUGGING_FACE.but(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"))
GGUF = names.GGUF.but(q_norm="attn_q_norm", k_norm="attn_k_norm")
VISION_KEYS = (gguf_config.SECTIONS, "n_deepstack_layers")  # in files with a separate vision file
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    return config_hf.read_text_part(config, read_text) if "text_config" in config else read_text(config)


def read_text(config: ConfigReader) -> ModelSpec:
    config.size("head_dim")  # required: the default is 128, not the width divided by the heads
    spec = replace(config_hf.read_decoder(config, "qwen3"), biases=config_hf.read_biases(config))
    return with_upper_windows(config, normed(spec))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    config.count("n_deepstack_layers", 0)  # layers that receive image features
    return normed(gguf_config.read_decoder(config, tensors, "qwen3", interleaved=False, keys=VISION_KEYS))


def normed(spec: ModelSpec) -> ModelSpec:
    return replace(spec, attn=replace(spec.attn, qk_norm="head"))
