"""Reads Hunyuan (dense): Llama with norms of each head's queries and keys after RoPE.

A rotation keeps lengths, so both are normed before it. Scores depend only on the product of the two gains, which
multiplies the rotated queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from penstock.errors import MalformedFile
from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf import config as gguf_config
from penstock.model.packer import Packer
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
GGUF = names.GGUF.but(q_norm="attn_q_norm", k_norm="attn_k_norm")


def read_hf(config: ConfigReader) -> ModelSpec:
    config.number("rms_norm_eps")  # required: the default differs from other families
    config.ignore("eod_token_id")
    config.require("use_qk_norm", (True,), True)
    for key in ("mlp_bias", "use_cla"):
        config.require(key, (False,), False)
    spec = config_hf.read_decoder(config, "hunyuan", scaling=read_scaling(config))
    return normed(replace(spec, biases=config_hf.read_biases(config)))


def read_scaling(config: ConfigReader) -> ConfigReader | None:
    """Returns the RoPE table with the base stretched by `alpha`; None without `alpha`."""
    fields = config_hf.rope_fields(config)
    if fields.text("rope_type", fields.text("type", "default")) != "dynamic":
        return None
    dims = config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads"))
    if dims <= 2:
        raise MalformedFile(f"head_dim is {dims} in config.json; a dynamic RoPE needs more than 2")
    fields.require("factor", (1,), 1)
    base = fields.number("rope_theta", config.number("rope_theta", 10000.0), least=1.001)
    stretched = base * fields.number("alpha") ** (dims / (dims - 2))
    return fields.without("alpha", "type").having(rope_type="default", rope_theta=stretched)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    return normed(gguf_config.read_decoder(config, tensors, "hunyuan", interleaved=False))


def normed(spec: ModelSpec) -> ModelSpec:
    return replace(spec, attn=replace(spec.attn, qk_norm="head", q_gain=True))


def attention(spec: ModelSpec, pack: Packer, layer: int) -> decoder.Attention:
    plain = replace(spec, attn=replace(spec.attn, qk_norm="", q_gain=False))
    q, k = (f"layers.{layer}.{which}_norm" for which in "qk")
    size = spec.attn.head_dim
    return replace(
        decoder.attention(plain, pack, layer),
        spec=spec.attn,
        qk_norms=(pack.computed(q, size, np.ones_like), pack.computed(k, size, np.ones_like)),
        vectors={"q_gain": pack.product(q, k, size)},
    )


build = partial(decoder.build, mixer=attention)
