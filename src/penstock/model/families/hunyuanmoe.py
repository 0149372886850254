"""Reads Hunyuan MoE (A13B): dense Hunyuan's attention, experts, and a shared expert as wide as its MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader, size_in_each
from penstock.model.families import hunyuan
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ExpertSpec, ModelSpec
from penstock.model.tensor import Tensor

EXPERTS = names.EXPERTS | {
    "router": "mlp.gate.wg",
    "shared.gate": "mlp.shared_mlp.gate_proj",
    "shared.up": "mlp.shared_mlp.up_proj",
    "shared.down": "mlp.shared_mlp.down_proj",
}
HUGGING_FACE = hunyuan.HUGGING_FACE.but(**EXPERTS)
GGUF = hunyuan.GGUF
KEYS = ("expert_shared_feed_forward_length", "expert_shared_count")
build = hunyuan.build
NEUTRAL = (  # training, other heads, images, and disabled parts
    *("attention_head_dim", "cla_share_factor", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "class_num", "pool_type", "mask_init_id", "org_vocab_size", "im_start_id", "im_end_id"),
    *("im_newline_id", "image_token_id", "text_start_id", "text_end_id", "video_start_id", "video_end_id"),
    *("moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor", "num_media_embeds"),
)
OFF = ("add_classification_head", "group_limited_greedy", "position_embedding_xdrope", "use_mla")


def read_hf(config: ConfigReader) -> ModelSpec:
    config.ignore(*NEUTRAL)
    for key in OFF:
        config.require(key, (False,), False)
    config.require("norm_topk_prob", (True,), True)
    config.require("norm_type", ("rms",), "rms")
    config.require("use_mixed_mlp_moe", (True,), True)
    config.require("moe_layer_num_skipped", (0,), 0)
    spec = replace(hunyuan.read_hf(config), arch="hunyuanmoe")
    experts = config_hf.read_experts(config, spec, count="num_experts", hidden="intermediate_size", top_k="moe_topk")
    width = size_in_each(config, "moe_intermediate_size", experts.hidden)
    shared = size_in_each(config, "num_shared_expert", 1) * experts.hidden
    return with_experts(spec, replace(experts, hidden=width), shared)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    config.count("expert_shared_count", 1)
    spec = gguf_config.read_decoder(config, tensors, "hunyuanmoe", interleaved=False, keys=KEYS, experts=True)
    shared = config.size(KEYS[0], spec.hidden)
    return with_experts(hunyuan.normed(spec), gguf_config.read_experts(config, spec), shared)


def with_experts(spec: ModelSpec, experts: ExpertSpec, shared: int) -> ModelSpec:
    return replace(spec, experts=replace(experts, renormalize=True), shared_hidden=shared)
