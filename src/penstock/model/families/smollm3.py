"""Reads SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import FLAGS, ConfigReader
from penstock.model.families import llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec, RopeSpec, all_but_each
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE
GGUF = names.GGUF
INTERVAL = 4
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    spec = config_hf.read_decoder(config, "smollm3", tied=True, theta=2000000.0)
    config.require("use_sliding_window", (False,), False)
    config.ignore("sliding_window", "max_window_layers")  # only used with windows
    if any(config_hf.read_sliding(config, [False] * spec.layers)):
        raise config.unsupported("layer_types", config.strings("layer_types"), (config_hf.FULL,))
    rotated: Sequence[bool] = all_but_each(config.size("no_rope_layer_interval", INTERVAL), spec.layers)
    if "no_rope_layers" in config:
        rotated = config.array("no_rope_layers", FLAGS, spec.layers)
    return with_ropes(replace(spec, biases=config_hf.read_biases(config)), rotated)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(config, tensors, "smollm3", interleaved=True)
    return with_ropes(spec, all_but_each(INTERVAL, spec.layers))


def with_ropes(spec: ModelSpec, rotated: Sequence[bool]) -> ModelSpec:
    unrotated = replace(spec.attn, rope=RopeSpec((), spec.attn.rope.interleaved))
    return spec.with_attention([spec.attn if one else unrotated for one in rotated])
