"""Reads GLM-4.5, 4.6, 4.7 and Solar-Open: sigmoid-scored experts with a selection bias, a shared expert, and plain MLPs
in the first layers. A final multi-token prediction (MTP) layer can draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import MAX_LAYERS, ConfigReader
from penstock.model.families import llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ExpertSpec, ModelSpec
from penstock.model.tensor import Tensor

NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
HUGGING_FACE = names.HUGGING_FACE.but(**names.EXPERTS, **NORMS)
GGUF = names.GGUF.but(mlp_norm="post_attention_norm", q_norm="attn_q_norm", k_norm="attn_k_norm")
KEYS = ("expert_shared_count", "leading_dense_block_count", "nextn_predict_layers")
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    return read_solar(config) if config.strings("architectures") == ["SolarOpenForCausalLM"] else read_glm(config)


def read_solar(config: ConfigReader) -> ModelSpec:
    config.size("head_dim")  # required: the default differs from other families
    config.number("rms_norm_eps")
    config.require("first_k_dense_replace", (0,), 0)
    config.require("use_qk_norm", (False,), False)
    hidden = "intermediate_size" if "intermediate_size" in config else "moe_intermediate_size"
    spec = config_hf.read_decoder(config, "glm4moe", partial=True, theta=1000000.0, hidden_key=hidden)
    return with_experts(
        replace(spec, biases=read_biases(config)),
        read_experts(config, spec, renormalize=True),
        dense=0,
        shared=config.size("n_shared_experts", 1),
        normed=False,
    )


def read_biases(config: ConfigReader) -> frozenset[str]:
    return frozenset(("q", "k", "v") if config.flag("attention_bias", False) else ())


def read_glm(config: ConfigReader) -> ModelSpec:
    place = config if "partial_rotary_factor" in config else config_hf.rope_fields(config)
    place.number("partial_rotary_factor")  # required: the default is one half
    spec = config_hf.read_decoder(config, "glm4moe", partial=True)
    return with_experts(
        replace(
            spec,
            biases=read_biases(config),
            unused_layers=config.count("num_nextn_predict_layers", 0, most=MAX_LAYERS),
        ),
        read_experts(config, spec, renormalize=True),
        dense=config.count("first_k_dense_replace", 1),
        shared=config.size("n_shared_experts", 1),
        normed=config.flag("use_qk_norm", False),
    )


def read_experts(config: ConfigReader, spec: ModelSpec, *, renormalize: bool) -> ExpertSpec:
    """Reads sigmoid-scored, grouped experts; `renormalize` is a default."""
    experts = config_hf.read_experts(config, spec, count="n_routed_experts", hidden="moe_intermediate_size")
    return replace(
        experts,
        scoring="sigmoid",
        renormalize=config.flag("norm_topk_prob", renormalize),
        scale=config.number("routed_scaling_factor", 1.0),
        groups=config.size("n_group", 1),
        top_k_groups=config.size("topk_group", 1),
    )


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(
        config, tensors, "glm4moe", interleaved=False, partial=True, keys=KEYS, experts=True
    )
    unused = config.count("nextn_predict_layers", 0, most=spec.layers - 1)
    return with_experts(
        replace(spec, layers=spec.layers - unused, unused_layers=unused),
        gguf_config.read_experts(config, spec, scoring=2),
        dense=config.count("leading_dense_block_count", 0),
        shared=config.size("expert_shared_count"),
        normed="blk.0.attn_q_norm.weight" in tensors,
    )


def with_experts(spec: ModelSpec, experts: ExpertSpec, *, dense: int, shared: int, normed: bool) -> ModelSpec:
    return replace(
        spec,
        attn=replace(spec.attn, qk_norm="head" if normed else ""),
        experts=replace(experts, choice_bias=True),
        dense=frozenset(range(min(dense, spec.layers))),
        shared_hidden=shared * experts.hidden,
    )
