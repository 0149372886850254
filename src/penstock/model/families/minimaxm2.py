"""Reads MiniMax-M2: sigmoid-scored experts with a selection bias, norms over all of q and all of k, and RoPE on part of
each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import COUNTS, MAX_LAYERS, ConfigReader
from penstock.model.families import llama, mixtral
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ExpertSpec, ModelSpec
from penstock.model.tensor import Tensor

NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
BIAS = {"choice_bias": "block_sparse_moe.e_score_correction_bias"}
HUGGING_FACE = names.HUGGING_FACE.but(**mixtral.SPARSE, **NORMS, **BIAS)
GGUF = names.GGUF.but(q_norm="attn_q_norm", k_norm="attn_k_norm")
ONE_WAY = {  # fields whose other values the original code ignores
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "layernorm_full_attention_beta": 1,
    "layernorm_linear_attention_beta": 1,
    "layernorm_mlp_beta": 1,
}
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    config.size("head_dim")  # required: the default is 128, not the width divided by the heads
    for key, value in ONE_WAY.items():
        config.require(key, (value,), value)
    if config_hf.read_window(config, silent=0):
        raise config.unsupported("sliding_window", config.size("sliding_window"), ("null",))
    config.ignore("mlp_intermediate_size", "shared_moe_mode", "use_mtp")  # omitted parts
    spec = config_hf.read_decoder(config, "minimaxm2", theta=5000000.0, partial=True)
    if any(kind != 1 for kind in config.array("attn_type_list", COUNTS)):
        raise config.unsupported("attn_type_list", config.array("attn_type_list", COUNTS), ("1 for each layer",))
    modules = config.count("num_mtp_modules", 0, most=MAX_LAYERS)
    spec = replace(
        spec,
        biases=frozenset(),
        unused_layers=modules * config.count("mtp_transformer_layers", 1, most=MAX_LAYERS),
    )
    experts = config_hf.read_experts(config, spec, count="num_local_experts", hidden="intermediate_size")
    return with_experts(spec, replace(experts, scoring="sigmoid", renormalize=True))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(config, tensors, "minimaxm2", interleaved=False, partial=True, experts=True)
    return with_experts(spec, gguf_config.read_experts(config, spec, scoring=2))


def with_experts(spec: ModelSpec, experts: ExpertSpec) -> ModelSpec:
    return replace(spec, attn=replace(spec.attn, qk_norm="all"), experts=replace(experts, choice_bias=True))
