"""Reads Qwen3.5 and Qwen3.6, dense or with experts: Qwen3-Next with separate projections. The vision tower is left
out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.model import config_fields, config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import hybrid, qwen3next
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(
    delta_qkv="linear_attn.in_proj_qkv",
    delta_z="linear_attn.in_proj_z",
    delta_b="linear_attn.in_proj_b",
    delta_a="linear_attn.in_proj_a",
    **qwen3next.HYBRID,
)._replace(
    top=dict(names.HUGGING_FACE.top)
    | {"model.language_model.embed_tokens": "embed", "model.language_model.norm": "norm"},
    layer=re.compile(rf"model\.(?:language_model\.)?layers\.{names.NUMBER}\.(.+)"),
    ignored=re.compile(r"mtp\..+|model\.visual\..+"),
)
GGUF = qwen3next.GGUF.but(delta_b="ssm_beta", delta_a="ssm_alpha")
VISION = ("image_token_id", "video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id")
build = hybrid.build


def read_hf(config: ConfigReader) -> ModelSpec:
    if "text_config" in config:
        config.ignore(*VISION, "language_model_only")
        tied = config.flag("tie_word_embeddings", False)
        text = config.table("text_config")
        text.require("tie_word_embeddings", (tied,), tied)
        spec = read_text(text, tied)
        text.note_unread(config_fields.NEUTRAL, config_fields.CHANGING)
        return spec
    return read_text(config, False)


def read_text(config: ConfigReader, tied: bool) -> ModelSpec:
    experts = "num_experts" in config
    spec = config_hf.read_decoder(
        config,
        "qwen35",
        tied=tied,
        partial=True,
        hidden_key="moe_intermediate_size" if experts else "intermediate_size",
    )
    spec = hybrid.read_hf(config, spec)
    return hybrid.read_experts(config, spec, renormalize=True) if experts else spec


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    experts = "expert_count" in config
    spec = gguf_config.read_decoder(
        config,
        tensors,
        "qwen35",
        interleaved=False,
        partial=True,
        keys=(*hybrid.GGUF_KEYS, gguf_config.SECTIONS),
        experts=experts,
        hidden_key="expert_feed_forward_length" if experts else "feed_forward_length",
    )
    spec = hybrid.read_gguf(config, spec, tiled=True)
    return hybrid.read_gguf_experts(config, spec) if experts else spec
