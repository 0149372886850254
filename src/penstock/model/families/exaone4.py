"""Reads EXAONE 4: norms after attention and MLP instead of before them, and norms of each head's q and k. Larger models
have windows in three of four layers, and RoPE only there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.model import config_hf
from penstock.model.config_reader import ConfigReader
from penstock.model.families import cohere2, olmo2, qwen3
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec, all_but_each
from penstock.model.tensor import Tensor

HUGGING_FACE = olmo2.HUGGING_FACE
GGUF = olmo2.GGUF
PERIOD = 4
PATTERN = "sliding_window_pattern"
build = olmo2.build


def read_hf(config: ConfigReader) -> ModelSpec:
    config.number("rms_norm_eps")  # required: the default differs from other families
    spec = replace(config_hf.read_decoder(config, "exaone4"), biases=frozenset())
    window = config_hf.read_window(config, 4096)
    if "layer_types" in config:
        config.ignore(PATTERN)  # a shorthand for the layer types
        return in_layers(spec, config_hf.read_sliding(config, [False] * spec.layers), window)
    return in_layers(spec, all_but_each(config.size(PATTERN, PERIOD), spec.layers), window)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    keys = (gguf_config.WINDOW, gguf_config.PATTERN)
    spec = gguf_config.read_decoder(config, tensors, "exaone4", interleaved=False, keys=keys)
    sliding = gguf_config.read_sliding(config, spec.layers, PERIOD)
    return in_layers(spec, sliding, gguf_config.read_window(config))


def in_layers(spec: ModelSpec, sliding: Sequence[bool], window: int) -> ModelSpec:
    spec = qwen3.normed(spec)
    return cohere2.in_layers(spec, sliding, window) if window else spec
