"""What a model is, from the config.json of a Hugging Face folder.

Transformers 5 writes everything about the rotary embedding in `rope_parameters`; before that it was `rope_theta` and
`rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import MalformedFile
from penstock.model import rope
from penstock.model.fields import Fields
from penstock.model.spec import AttentionSpec, ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama"}
MISTRAL_WINDOW = 4096  # when the config is silent; null says that there is none
ROPE_KEYS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",
    "high_freq_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "truncate",
    "type",
}


def read_spec(values: Mapping[str, Any]) -> ModelSpec:
    config = Fields(values, "config.json")
    arch = architecture(config)
    config.require("hidden_act", ("silu",), "silu")
    dim, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.size("head_dim", dim // heads, most=rope.MAX_DIMS)
    max_len = config.size("max_position_embeddings")
    return ModelSpec(
        arch=arch,
        layers=config.size("num_hidden_layers"),
        dim=dim,
        hidden=config.size("intermediate_size"),
        vocab=config.size("vocab_size"),
        max_len=max_len,
        eps=config.number("rms_norm_eps", 1e-6),
        attn=AttentionSpec(
            heads=heads,
            kv_heads=config.size("num_key_value_heads", heads),
            head_dim=head_dim,
            rope=read_rope(config, head_dim, max_len),
            window=read_window(config, values),
        ),
        tied=config.flag("tie_word_embeddings", False),
    )


def architecture(config: Fields) -> str:
    names = config.strings("architectures")
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise config.unsupported("architectures", names, ARCHITECTURES)
    return ARCHITECTURES[names[0]]


def read_window(config: Fields, values: Mapping[str, Any]) -> int:
    if config.strings("architectures") != ["MistralForCausalLM"]:
        return 0
    return 0 if values.get("sliding_window", MISTRAL_WINDOW) is None else config.size("sliding_window", MISTRAL_WINDOW)


def read_rope(config: Fields, head_dim: int, max_len: int) -> RopeSpec:
    fields = config.table("rope_scaling" if "rope_scaling" in config else "rope_parameters")
    fields.refuse_others(ROPE_KEYS)
    for place in (config, fields):
        place.require("partial_rotary_factor", (1,), 1)
    base = fields.number("rope_theta", config.number("rope_theta", 10000.0), least=1.001)
    original = config.size("original_max_position_embeddings", fields.size("original_max_position_embeddings", max_len))
    freqs = rope.plain(base, head_dim)
    match fields.text("rope_type", fields.text("type", "default")):
        case "default":
            return RopeSpec(freqs, interleaved=False)
        case "linear":
            return RopeSpec(rope.linear(freqs, fields.number("factor")), interleaved=False)
        case "llama3":
            return RopeSpec(read_llama3(fields, freqs, original), interleaved=False)
        case "yarn":
            return read_yarn(fields, freqs, base, original, max_len)
        case kind:
            raise fields.unsupported("rope_type", kind, ("default", "linear", "llama3", "yarn"))


def read_llama3(fields: Fields, freqs: rope.Freqs, original: int) -> rope.Freqs:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if low >= high:
        raise MalformedFile(f"low_freq_factor {low} must be below high_freq_factor {high} in config.json")
    return rope.llama3(freqs, fields.number("factor"), low, high, original)


def read_yarn(fields: Fields, freqs: rope.Freqs, base: float, original: int, max_len: int) -> RopeSpec:
    factor = fields.number("factor", max_len / original)
    scale = rope.yarn_scale(factor)
    if "mscale" in fields and "mscale_all_dim" in fields:
        scale = rope.yarn_scale(factor, fields.number("mscale")) / rope.yarn_scale(
            factor, fields.number("mscale_all_dim")
        )
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


def check_biases(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """The config says which weights have a bias; a checkpoint that differs would be computed wrongly."""
    config = Fields(values, "config.json")
    parts: tuple[str, ...] = ()
    if config.flag("attention_bias", False):
        parts += ("q", "k", "v", "o")
    if config.flag("mlp_bias", False):
        parts += ("gate", "up", "down")
    wanted = {f"{name}.bias" for name in tensors if name.rpartition(".")[2] in parts}
    found = {name for name in tensors if name.endswith(".bias")}
    if wanted != found:
        raise MalformedFile(
            f"attention_bias and mlp_bias in config.json do not match the tensors: {min(wanted ^ found)!r} is "
            f"{'missing' if min(wanted ^ found) in wanted else 'too many'}"
        )
