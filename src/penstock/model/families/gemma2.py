"""Reads Gemma 2: norms before and after attention and MLP, a window in every other layer, and soft caps on scores and
logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import ConfigReader, number_or_null
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec, all_but_each
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(
    after_attn_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    after_mlp_norm="post_feedforward_layernorm",
)
GGUF = names.GGUF.but(after_attn_norm="post_attention_norm", after_mlp_norm="post_ffw_norm")
SCORES, LOGITS = CAPS = "attn_logit_softcapping", "final_logit_softcapping"
KEYS = (*CAPS, gguf_config.WINDOW)
LARGEST = 46  # only the largest model has another score scale
build = partial(decoder.build, post_norm=True)


def read_hf(config: ConfigReader) -> ModelSpec:
    spec = scaled(config_hf.read_decoder(config, "gemma2", tied=True, act_key="hidden_activation"))
    spec = capped(spec, number_or_null(config, SCORES, 50.0), number_or_null(config, LOGITS, 30.0))
    config.require("use_bidirectional_attention", (False,), False)
    window = config.size("sliding_window", config.size("sliding_window_size", 4096))
    return read_rest(config, spec).with_windows(config_hf.read_sliding(config, all_but_each(2, spec.layers)), window)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = scaled(gguf_config.read_decoder(config, tensors, "gemma2", interleaved=False, keys=KEYS))
    spec = capped(spec, config.number(SCORES, 50.0), config.number(LOGITS, 30.0))
    spec = replace(spec, attn=replace(spec.attn, multiplier=score_scale(spec, LARGEST)))
    return spec.with_windows(all_but_each(2, spec.layers), config.size(gguf_config.WINDOW, 4096))


def scaled(spec: ModelSpec) -> ModelSpec:
    return replace(spec, act="gelu_tanh", embed_scale=spec.dim**0.5)


def capped(spec: ModelSpec, scores: float, logits: float) -> ModelSpec:
    return replace(spec, attn=replace(spec.attn, soft_cap=scores), logit_cap=logits)


def read_rest(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    for key in ("head_dim", "num_key_value_heads"):
        config.size(key)  # required: the default differs from other families
    config.require("hidden_activation", ("gelu_pytorch_tanh",))
    config.ignore("hidden_act")  # older configs have both
    attn = replace(spec.attn, multiplier=config.number("query_pre_attn_scalar", 256.0) ** -0.5)
    return replace(spec, attn=attn, gain_offset=1.0, biases=config_hf.read_biases(config))


def score_scale(spec: ModelSpec, largest: int) -> float:
    return float((spec.dim // spec.attn.heads if spec.layers == largest else spec.attn.head_dim) ** -0.5)
