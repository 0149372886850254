"""Reads Qwen3-MoE: Qwen3 with experts in all or some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import COUNTS, ConfigReader
from penstock.model.families import llama, qwen3
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = qwen3.HUGGING_FACE.but(**names.EXPERTS)
GGUF = qwen3.GGUF
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    return config_hf.read_text_part(config, read_text) if "text_config" in config else read_text(config)


def read_text(config: ConfigReader) -> ModelSpec:
    spec = replace(qwen3.read_text(config), arch="qwen3moe")
    count = "num_experts" if "num_experts" in config else "num_local_experts"
    experts = config_hf.read_experts(config, spec, count=count, hidden="moe_intermediate_size")
    return replace(
        spec,
        experts=replace(experts, renormalize=config.flag("norm_topk_prob", False)),
        dense=frozenset(read_dense(config, spec.layers)),
    )


def read_dense(config: ConfigReader, layers: int) -> set[int]:
    """Returns the layers without experts: those listed, and those between the periodic MoE layers."""
    step = config.size("decoder_sparse_step", 1)
    return {*config.array("mlp_only_layers", COUNTS), *(layer for layer in range(layers) if (layer + 1) % step)}


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    config.count("n_deepstack_layers", 0)
    spec = qwen3.normed(
        gguf_config.read_decoder(config, tensors, "qwen3moe", interleaved=False, keys=qwen3.VISION_KEYS, experts=True)
    )
    return replace(spec, experts=gguf_config.read_experts(config, spec))
