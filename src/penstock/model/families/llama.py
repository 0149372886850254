"""Reads the Llama family: Llama 2 and 3, SmolLM2, Falcon3, Mistral, Ministral, CWM and similar models. GGUF files of
this architecture with experts are Mixtral.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.beside_vision(names.HUGGING_FACE)
GGUF = names.GGUF
MISTRAL_WINDOW = 4096  # default; null means no window
build = decoder.build


def read_hf(config: ConfigReader) -> ModelSpec:
    if "text_config" in config:
        return config_hf.read_text_part(config, read_mistral)
    match config.strings("architectures"):
        case ["LlamaForCausalLM"]:
            return read_llama(config)
        case ["CwmForCausalLM"]:
            return read_cwm(config)
    return read_mistral(config)


def read_llama(config: ConfigReader) -> ModelSpec:
    config.require("rope_interleaved", (False,), False)
    return replace(config_hf.read_decoder(config, "llama"), biases=config_hf.read_biases(config))


def read_mistral(config: ConfigReader) -> ModelSpec:
    spec = read_llama(config)
    window = config_hf.read_window(config, MISTRAL_WINDOW)
    return spec.with_windows(config_hf.read_sliding(config, [window > 0] * spec.layers), window)


def read_cwm(config: ConfigReader) -> ModelSpec:
    """Reads CWM: Llama with windows in some layers."""
    config_hf.rope_fields(config).text("rope_type")  # required: the default differs from other families
    config.require("attention_bias", (False,), False)
    spec = read_llama(config)
    # full attention in every fourth layer, from the first
    every_fourth = [layer % 4 != 0 for layer in range(spec.layers)]
    return spec.with_windows(config_hf.read_sliding(config, every_fourth), config.size("sliding_window", 8192))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(
        config, tensors, "llama", interleaved=True, keys=(gguf_config.WINDOW,), experts=True
    )
    if config.count("expert_count", 0):
        spec = replace(spec, arch="mixtral", experts=gguf_config.read_experts(config, spec))
    return spec.with_windows([True] * spec.layers, gguf_config.read_window(config))
