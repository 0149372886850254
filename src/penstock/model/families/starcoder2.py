"""Reads StarCoder2: GPT-2 with RoPE instead of learned positions, grouped-query attention, and windows that GGUF files
do not mention.
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

HUGGING_FACE = names.HUGGING_FACE.but(up="mlp.c_fc", down="mlp.c_proj")
GGUF = names.GGUF
NORMS = frozenset(("attn_norm", "mlp_norm", "norm"))
build = gpt2.build_with_layer_norms


def read_hf(config: ConfigReader) -> ModelSpec:
    config.ignore("residual_dropout", "embedding_dropout")
    config.require("hidden_act", ("gelu_pytorch_tanh",))
    config.require("norm_type", ("layer_norm",), "layer_norm")
    config.require("mlp_type", ("default",), "default")
    config.number("norm_epsilon")  # required: the default differs from other families
    spec = config_hf.read_decoder(config, "starcoder2", eps_key="norm_epsilon", tied=True)
    window = config_hf.read_window(config, 0)
    biases = gpt2.BIASES if config.flag("use_bias", True) else NORMS
    spec = replace(spec, biases=biases)
    return spec.with_windows(config_hf.read_sliding(config, [window > 0] * spec.layers), window)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(
        config, tensors, "starcoder2", interleaved=False, eps_key=gguf_config.LAYER_EPS, keys=(gguf_config.WINDOW,)
    )
    spec = replace(spec, act="gelu_tanh")
    return spec.with_windows([True] * spec.layers, gguf_config.read_window(config))
