"""Reads Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one layer norm, RoPE on part of each head, and
biases everywhere, including the output head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import gpt2
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE._replace(
    top={"model.embed_tokens": "embed", "model.final_layernorm": "norm", "lm_head": "head"}
).but(o="self_attn.dense", up="mlp.fc1", down="mlp.fc2")
GGUF = names.GGUF.but(qkv="attn_qkv")  # older files fuse q, k and v
BIASES = gpt2.BIASES | {"head"}
ROTATED_SHARE = "partial_rotary_factor"
build = gpt2.build_with_layer_norms


def read_hf(config: ConfigReader) -> ModelSpec:
    config.text("hidden_act"), config.number("layer_norm_eps")  # required: the defaults differ from other families
    config.require("qk_layernorm", (False,), False)
    config.require(config_hf.TIED, (False,), False)  # a tied head cannot have a bias
    share = {ROTATED_SHARE: config.number(ROTATED_SHARE, 0.5)}
    spec = config_hf.read_decoder(
        config,
        "phi2",
        eps_key="layer_norm_eps",
        partial=True,
        scaling=config_hf.rope_fields(config).with_defaults(share),
        acts=gpt2.ACTS,
    )
    return replace(spec, biases=BIASES, parallel=True)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(
        config, tensors, "phi2", interleaved=False, partial=True, eps_key=gguf_config.LAYER_EPS
    )
    return replace(spec, act="gelu_tanh", biases=BIASES, parallel=True)
