"""Reads Mixtral: Llama with experts. Its GGUF architecture is `llama`."""

from __future__ import annotations

from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import llama
from penstock.model.spec import ModelSpec

SPARSE = {
    "router": "block_sparse_moe.gate",
    "experts.*.gate": "block_sparse_moe.experts.*.w1",
    "experts.*.up": "block_sparse_moe.experts.*.w3",
    "experts.*.down": "block_sparse_moe.experts.*.w2",
    "experts.gate_up": "mlp.experts.gate_up_proj",
    "experts.down": "mlp.experts.down_proj",
}
HUGGING_FACE = names.HUGGING_FACE.but(**SPARSE)
GGUF = names.GGUF
build = llama.build
read_gguf = llama.read_gguf


def read_hf(config: ConfigReader) -> ModelSpec:
    spec = replace(config_hf.read_decoder(config, "mixtral", theta=1000000.0), biases=frozenset())
    experts = config_hf.read_experts(config, spec, count="num_local_experts", hidden="intermediate_size")
    spec = replace(spec, experts=replace(experts, renormalize=True))
    return spec.with_windows([True] * spec.layers, config_hf.read_window(config, silent=0))
