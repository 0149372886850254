"""Reads OLMo2: norms after attention and MLP instead of before them, and norms over all queries and all keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    after_attn_norm="post_attention_layernorm",
    after_mlp_norm="post_feedforward_layernorm",
)
GGUF = names.GGUF.but(
    q_norm="attn_q_norm", k_norm="attn_k_norm", after_attn_norm="post_attention_norm", after_mlp_norm="post_ffw_norm"
)
build = partial(decoder.build, pre_norm=False, post_norm=True)


def read_hf(config: ConfigReader) -> ModelSpec:
    config.number("rms_norm_eps")  # silence would mean another than elsewhere
    return normed(replace(config_hf.read_decoder(config, "olmo2"), biases=config_hf.read_biases(config)))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    return normed(gguf_config.read_decoder(config, tensors, "olmo2", interleaved=False))


def normed(spec: ModelSpec) -> ModelSpec:
    """Returns the spec with norms over all q and all k."""
    return replace(spec, attn=replace(spec.attn, qk_norm="all"))
