"""Reads DeepSeek V2 and V3 (R1, Kimi-K2, Moonlight) and GLM-4.7-Flash: MLA, which caches 576 numbers per token and
layer (V3), grouped experts with a shared one, and plain MLPs in the first layers. A final multi-token prediction (MTP)
layer can draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import log

from penstock.model import config_hf, decoder, names, rope
from penstock.model.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader
from penstock.model.families import mla
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import AttentionSpec, ExpertSpec, MlaSpec, ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(
    **names.EXPERTS,
    q_a="self_attn.q_a_proj", q_norm="self_attn.q_a_layernorm", q_b="self_attn.q_b_proj",
    kv_a="self_attn.kv_a_proj_with_mqa", kv_norm="self_attn.kv_a_layernorm", kv_b="self_attn.kv_b_proj",
)  # fmt: skip
GGUF = names.GGUF.but(
    q_a="attn_q_a", q_norm="attn_q_a_norm", q_b="attn_q_b",
    kv_a="attn_kv_a_mqa", kv_norm="attn_kv_a_norm", kv_b="attn_kv_b", k_b="attn_k_b", v_b="attn_v_b",
)  # fmt: skip
NEUTRAL = ("aux_loss_alpha", "seq_aux", "ep_size", "qk_head_dim")  # training options, or sums of other fields
KEY, VALUE = "attention.key_length", "attention.value_length"
KV_HEADS = "attention.head_count_kv"
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
KEYS = (
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    f"{KEY}_mla",
    f"{VALUE}_mla",
    "expert_shared_count",
    "leading_dense_block_count",
    "nextn_predict_layers",
    LOG_MULTIPLIER,
)
SECOND, THIRD, GLM = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"
DENSE = {SECOND: 0, GLM: 1}  # default number of layers without experts; others: 3
GLMS = (GLM, "GlmMoeDsaForCausalLM")
GLM_SAYS = (
    "n_group",
    "rms_norm_eps",
    "routed_scaling_factor",
    "topk_group",
)  # required: DeepSeek's defaults do not apply
build = partial(decoder.build, mixer=mla.attention)


def read_hf(config: ConfigReader) -> ModelSpec:
    for bias in ("attention_bias", "mlp_bias"):
        config.require(bias, (False,), False)
    config.require("moe_layer_freq", (1,), 1)
    config.ignore(*NEUTRAL)
    dims = config.size("qk_rope_head_dim", most=rope.MAX_DIMS)
    spec = config_hf.read_decoder(config, "deepseek2", scaling=ConfigReader({}, ""))
    architecture = config.strings("architectures")[0]
    third = architecture != SECOND
    if architecture in GLMS:
        for key in GLM_SAYS:
            config.number(key)
    rotation = config_hf.read_rope(config, dims, spec.max_len)
    heads = MlaSpec(
        qk_nope_head_dim=config.size("qk_nope_head_dim"),
        v_head_dim=config.size("v_head_dim"),
        q_lora_rank=config.size("q_lora_rank") if "q_lora_rank" in config else 0,
    )
    interleaved = config.flag("rope_interleave", True)
    scaling = config_hf.rope_fields(config)
    weight = scaling.number("mscale_all_dim", 0.0, least=0.0) if "factor" in scaling else 0.0
    stretch = rope.yarn_scale(scaling.number("factor"), weight) if weight else 1.0
    unused = config.count("num_nextn_predict_layers", config.count("num_mtp_layers", 0), most=MAX_LAYERS)
    return with_mla(
        replace(spec, biases=frozenset(), unused_layers=unused),
        heads,
        replace(rotation, interleaved=interleaved),
        rank=config.size("kv_lora_rank", most=rope.MAX_DIMS),
        stretch=stretch,
        experts=read_experts(config, spec, third),
        dense=read_dense(config, spec.layers, DENSE.get(architecture, 3)),
        shared=config.size("n_shared_experts", 1 if third else 2),
    )


def read_dense(config: ConfigReader, layers: int, silent: int) -> frozenset[int]:
    """Reads the layers without experts: the first ones, or those in `mlp_layer_types`."""
    first = min(config.count("first_k_dense_replace", silent), layers)
    if "mlp_layer_types" not in config:
        return frozenset(range(first))
    kinds = config.strings("mlp_layer_types")
    if len(kinds) != layers or not {"dense", "sparse"}.issuperset(kinds):
        raise config.unsupported("mlp_layer_types", kinds, ("dense or sparse for each layer",))
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")


def read_experts(config: ConfigReader, spec: ModelSpec, third: bool) -> ExpertSpec:
    experts = config_hf.read_experts(config, spec, count="n_routed_experts", hidden="moe_intermediate_size")
    method = "noaux_tc" if third else config.text("topk_method", "greedy")
    config.require("topk_method", (method,) if third else ("greedy", "group_limited_greedy"), method)
    config.require("scoring_func", ("sigmoid",) if third else ("softmax",), "sigmoid" if third else "softmax")
    if not third:
        config.require("norm_topk_prob", (False,), False)  # if true, the original does not scale
    grouped = method != "greedy"
    return replace(
        experts,
        scoring="sigmoid" if third else "softmax",
        renormalize=config.flag("norm_topk_prob", third),
        scale=config.number("routed_scaling_factor", 2.5 if third else 1.0),
        choice_bias=third,
        groups=config.size("n_group", 8 if third else 1, most=MAX_EXPERTS) if grouped else ignored(config, "n_group"),
        top_k_groups=config.size("topk_group", 4 if third else 1) if grouped else ignored(config, "topk_group"),
        group_score="top2" if third else "max",
    )


def ignored(config: ConfigReader, key: str) -> int:
    config.ignore(key)
    return 1


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    rank = config.size("attention.kv_lora_rank", most=rope.MAX_DIMS)
    dims = config.size("rope.dimension_count", most=rope.MAX_DIMS)
    suffix = "_mla" if f"{KEY}_mla" in config else ""  # in newer files the plain keys describe latents
    config.require(KV_HEADS, (1,) if suffix else (config.size("attention.head_count"),))
    if suffix:
        config.require(KEY, (rank + dims,))
        config.require(VALUE, (rank,))
    config.refuse_others(gguf_config.KEYS.union(gguf_config.EXPERTS, KEYS, (gguf_config.RMS_EPS,)))
    plain = config.without(KEY, VALUE, KV_HEADS, "rope.dimension_count")
    spec = gguf_config.read_decoder(plain, tensors, "deepseek2", interleaved=True, experts=True, keys=KEYS)
    key_dim = config.size(f"{KEY}{suffix}", most=rope.MAX_DIMS) - dims
    heads = MlaSpec(
        key_dim,
        config.size(f"{VALUE}{suffix}"),
        config.size("attention.q_lora_rank") if "attention.q_lora_rank" in config else 0,
    )
    rotation = gguf_config.read_rope(config, tensors, dims, spec.max_len)
    stretch = 1 + config.number(LOG_MULTIPLIER, 0.0, least=0.0) * log(config.number("rope.scaling.factor", 1.0))
    unused = config.count("nextn_predict_layers", 0, most=spec.layers - 1)
    experts = gguf_config.read_experts(config, spec, renormalize=False)
    third = experts.scoring == "sigmoid"
    return with_mla(
        replace(spec, layers=spec.layers - unused, unused_layers=unused),
        heads,
        replace(rotation, scale=1.0),
        rank=rank,
        stretch=stretch,
        experts=replace(experts, choice_bias=has_bias(tensors), group_score="top2" if third else "max"),
        dense=frozenset(range(min(config.count("leading_dense_block_count", 0), spec.layers - unused))),
        shared=config.size("expert_shared_count"),
    )


def has_bias(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.endswith(".exp_probs_b.bias") for name in tensors)


def with_mla(
    spec: ModelSpec,
    heads: MlaSpec,
    rotation: RopeSpec,
    *,
    rank: int,
    stretch: float,  # factor of both queries and keys
    experts: ExpertSpec,
    dense: frozenset[int],
    shared: int,
) -> ModelSpec:
    dims = 2 * len(rotation.inv_freq)
    return replace(
        spec,
        attn=AttentionSpec(
            heads=spec.attn.heads,
            kv_heads=1,
            head_dim=dims + rank,
            rope=rotation,
            multiplier=stretch**2 * (heads.qk_nope_head_dim + dims) ** -0.5,
            v_dim=rank,
        ),
        mla=heads,
        experts=experts,
        dense=dense,
        shared_hidden=shared * experts.hidden,
    )
