"""Reads Cohere's Command R, Command R+ and Aya: attention and MLP in parallel after one layer norm without a bias, RoPE
on neighbouring pairs, and scaled logits. Command R+ norms the queries and keys of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
GGUF = names.GGUF.but(q_norm="attn_q_norm", k_norm="attn_k_norm")
LOGITS = "logit_scale"
CONTEXT = "model_max_length"
build = partial(decoder.build, norm=decoder.unbiased_layer_norm)


def read_hf(config: ConfigReader) -> ModelSpec:
    spec = with_qk_norm(read_as("cohere", config, theta=500000.0), config.flag("use_qk_norm", False))
    # Published configs have 8192 here, the context of the first training phase.
    return replace(spec, max_len=max(spec.max_len, config.size(CONTEXT, spec.max_len)))


def read_as(arch: str, config: ConfigReader, theta: float) -> ModelSpec:
    config.number("layer_norm_eps")  # required: the default differs from other families
    spec = config_hf.read_decoder(config, arch, eps_key="layer_norm_eps", tied=True, theta=theta)
    spec = replace(spec, biases=config_hf.read_biases(config), logit_scale=config.number(LOGITS, 0.0625))
    return in_parallel(spec)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    return with_qk_norm(read_file("cohere", config, tensors), "blk.0.attn_q_norm.weight" in tensors)


def read_file(arch: str, config: ConfigReader, tensors: Mapping[str, Tensor], *keys: str) -> ModelSpec:
    spec = gguf_config.read_decoder(
        config, tensors, arch, interleaved=True, eps_key=gguf_config.LAYER_EPS, keys=(LOGITS, *keys)
    )
    return in_parallel(replace(spec, logit_scale=config.number(LOGITS)))


def with_qk_norm(spec: ModelSpec, normed: bool) -> ModelSpec:
    return replace(spec, attn=replace(spec.attn, qk_norm="layer")) if normed else spec


def in_parallel(spec: ModelSpec) -> ModelSpec:
    rope = replace(spec.attn.rope, interleaved=True)
    return replace(spec, attn=replace(spec.attn, rope=rope), parallel=True)
