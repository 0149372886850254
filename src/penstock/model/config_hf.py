"""Reads a model's spec from the config.json of a Hugging Face folder.

Transformers 5 writes everything about the rotary embedding in `rope_parameters`; earlier versions wrote `rope_theta`
and `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import MalformedFile
from penstock.model import rope
from penstock.model.config_fields import CHANGING, NEUTRAL
from penstock.model.config_reader import COUNTS, MAX_EXPERTS, MAX_LAYERS, ConfigReader, size_in_each
from penstock.model.spec import AttentionSpec, ExpertSpec, ModelSpec, RopeSpec

SLIDING, FULL = "sliding_attention", "full_attention"
ACTS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
TIED = "tie_word_embeddings"
VISION = (
    *("vision_config", "vision_feature_layer", "vision_feature_select_strategy", "mm_tokens_per_image"),
    *("image_token_id", "image_token_index", "boi_token_index", "eoi_token_index", "image_seq_length"),
    *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
    *("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"),
)
ROPE_TYPES = ("default", "linear", "llama3", "mrope", "yarn")
ROPE_KEYS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",
    "high_freq_factor",
    "low_freq_factor",
    "mrope_interleaved",
    "mrope_section",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "truncate",
    "type",
}


def read_decoder(
    config: ConfigReader,
    arch: str,
    *,
    act_key: str = "hidden_act",
    eps_key: str = "rms_norm_eps",
    tied: bool = False,
    theta: float = 10000.0,
    partial: bool = False,
    scaling: ConfigReader | None = None,
    hidden_key: str = "intermediate_size",
    acts: Mapping[str, str] = ACTS,
) -> ModelSpec:
    """Reads the fields that most families share. `tied` and `theta` are defaults for absent fields. `partial` allows
    RoPE on part of a head; `scaling` overrides the table that describes RoPE. `acts` are the activations that the
    family supports.
    """
    dim, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.size("head_dim", dim // heads, most=rope.MAX_DIMS)
    max_len = config.size("max_position_embeddings")
    config.require(act_key, tuple(acts), "silu")
    return ModelSpec(
        arch=arch,
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        dim=dim,
        hidden=config.size(hidden_key),
        vocab=config.size("vocab_size"),
        max_len=max_len,
        eps=config.number(eps_key, 1e-6),
        attn=AttentionSpec(
            heads=heads,
            kv_heads=config.size("num_key_value_heads", heads),
            head_dim=head_dim,
            rope=read_rope(config, head_dim, max_len, theta, partial, scaling),
        ),
        act=acts[config.text(act_key, "silu")],
        tied=config.flag(TIED, tied),
    )


def read_text_part(
    config: ConfigReader,
    read: Callable[[ConfigReader], ModelSpec],
    silent: Mapping[str, Any] | None = None,
    key: str = "text_config",
) -> ModelSpec:
    """Reads the text model from `text_config` (or `key`) of a multimodal config. Images are not supported yet. `silent`
    has the defaults of the text part.
    """
    config.ignore(*VISION)
    text = config.table(key).with_defaults(silent or {})
    if TIED in config:  # then the text part's value is irrelevant
        text.flag(TIED, False)
        text = text.having(**{TIED: config.flag(TIED, False)})
    text.ignore("architectures")
    spec = read(text)
    text.note_unread(NEUTRAL, CHANGING)
    return spec


def read_biases(config: ConfigReader) -> frozenset[str]:
    attention = ("q", "k", "v", "o") if config.flag("attention_bias", False) else ()
    return frozenset((*attention, *(("gate", "up", "down") if config.flag("mlp_bias", False) else ())))


def read_experts(
    config: ConfigReader, spec: ModelSpec, *, count: str, hidden: str, top_k: str = "num_experts_per_tok"
) -> ExpertSpec:
    """Reads the sizes of an MoE layer; `count`, `hidden` and `top_k` are the family's key names."""
    config.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # training only
    return ExpertSpec(
        count=size_in_each(config, count, most=MAX_EXPERTS),
        top_k=size_in_each(config, top_k, most=MAX_EXPERTS),
        hidden=config.size(hidden),
        act=spec.act,
    )


def read_window(config: ConfigReader, silent: int) -> int:
    """Reads the attention window: 0 for null, `silent` if absent."""
    if "sliding_window" in config:
        return config.size("sliding_window")
    return 0 if config.says_null("sliding_window") else silent


def read_sliding(config: ConfigReader, otherwise: Sequence[bool]) -> Sequence[bool]:
    """Reads which layers use a window from `layer_types`, if present."""
    if "layer_types" not in config:
        return otherwise
    kinds = config.strings("layer_types")
    if len(kinds) != len(otherwise) or not {SLIDING, FULL}.issuperset(kinds):
        raise config.unsupported("layer_types", kinds, (f"{SLIDING} or {FULL} for each layer",))
    return [kind == SLIDING for kind in kinds]


def rope_fields(config: ConfigReader) -> ConfigReader:
    return config.table("rope_scaling" if "rope_scaling" in config else "rope_parameters")


def read_two_ropes(config: ConfigReader, theta: float) -> tuple[ConfigReader, float] | None:
    """Returns the RoPE table of full-attention layers and the RoPE base of windowed layers if the config has both.
    `theta` is the default base.
    """
    both = config.table("rope_parameters")
    if FULL not in both:
        return None
    both.refuse_others((FULL, SLIDING))
    near = both.table(SLIDING)
    near.refuse_others(("rope_theta", "rope_type"))
    near.require("rope_type", ("default",), "default")
    return both.table(FULL), near.number("rope_theta", theta, least=1.001)


def read_rope(
    config: ConfigReader,
    head_dim: int,
    max_len: int,
    theta: float = 10000.0,
    partial: bool = False,
    scaling: ConfigReader | None = None,
) -> RopeSpec:
    fields = scaling or rope_fields(config)
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind not in ROPE_TYPES:
        raise fields.unsupported("rope_type", kind, ROPE_TYPES)
    fields.refuse_others(ROPE_KEYS)
    fields.array("mrope_section", COUNTS)  # pairs rotated by time, height and width; in text all three are the position
    fields.flag("mrope_interleaved", False)
    dims = min(read_rotated(place, head_dim, partial) for place in (config, fields))
    base = fields.number("rope_theta", config.number("rope_theta", theta), least=1.001)
    original = config.size("original_max_position_embeddings", fields.size("original_max_position_embeddings", max_len))
    freqs = rope.plain(base, dims)
    match kind:
        case "linear":
            return RopeSpec(rope.linear(freqs, fields.number("factor")), interleaved=False)
        case "llama3":
            return RopeSpec(read_llama3(fields, freqs, original), interleaved=False)
        case "yarn":
            return read_yarn(fields, freqs, base, original, max_len)
    return RopeSpec(freqs, interleaved=False)


def read_rotated(place: ConfigReader, head_dim: int, partial: bool) -> int:
    rotated = int(head_dim * place.number("partial_rotary_factor", 1.0))
    if partial and "rotary_dim" in place:
        rotated = place.size("rotary_dim", most=head_dim)
        if rotated % 2:
            raise place.unsupported("rotary_dim", rotated, ("even numbers",))
    if rotated > head_dim or rotated % 2 or not partial:
        place.require("partial_rotary_factor", (1,), 1)
    return rotated


def read_llama3(fields: ConfigReader, freqs: rope.Freqs, original: int) -> rope.Freqs:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if low > high:
        raise MalformedFile(f"low_freq_factor {low} must not be above high_freq_factor {high} in config.json")
    return rope.llama3(freqs, fields.number("factor"), low, high, original)


def read_yarn(fields: ConfigReader, freqs: rope.Freqs, base: float, original: int, max_len: int) -> RopeSpec:
    factor = fields.number("factor", max_len / original)
    scale = rope.yarn_scale(factor)
    mscales = [fields.number(key, 0.0, least=0.0) for key in ("mscale", "mscale_all_dim")]
    if all(mscales):  # 0 counts as absent
        scale = rope.yarn_scale(factor, mscales[0]) / rope.yarn_scale(factor, mscales[1])
    stretched = rope.yarn(
        freqs,
        base=base,
        factor=factor,
        original=original,
        fast=fields.number("beta_fast", 32.0),
        slow=fields.number("beta_slow", 1.0),
        whole=fields.flag("truncate", True),
    )
    return RopeSpec(stretched, interleaved=False, scale=fields.number("attention_factor", scale))
