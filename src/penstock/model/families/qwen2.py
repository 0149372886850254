"""Reads Qwen2, Qwen2.5 and the text part of Qwen2-VL and Qwen2.5-VL: Llama with biases for q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.beside_vision(names.HUGGING_FACE)
GGUF = names.GGUF
BIASES = frozenset(("q", "k", "v"))
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    if "text_config" in config:
        return config_hf.read_text_part(config, read_text)
    if "vision_config" in config:  # older configs are flat
        config.ignore(*config_hf.VISION)
    return read_text(config)


def read_text(config: ConfigReader) -> ModelSpec:
    return with_upper_windows(config, replace(config_hf.read_decoder(config, "qwen2"), biases=BIASES))


def with_upper_windows(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """Returns the spec with a window in the layers from `max_window_layers` on, if enabled."""
    config.require("use_mrope", (False,), False)
    used = config.flag("use_sliding_window", False)
    first = config.number("max_window_layers", 28, least=0)
    sliding = config_hf.read_sliding(config, [used and layer >= first for layer in range(spec.layers)])
    window = config_hf.read_window(config, 4096)
    return spec.with_windows(sliding, window) if used else spec


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(config, tensors, "qwen2", interleaved=False, keys=(gguf_config.SECTIONS,))
    return replace(spec, biases=BIASES)
