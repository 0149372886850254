"""Reads a model's spec from GGUF metadata; tensors determine the vocabulary size and tying."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from penstock.errors import MalformedFile
from penstock.model import rope
from penstock.model.config_reader import COUNTS, FLAGS, MAX_EXPERTS, MAX_LAYERS, ConfigReader
from penstock.model.dequantize import dequantize
from penstock.model.spec import AttentionSpec, ExpertSpec, ModelSpec, RopeSpec, all_but_each
from penstock.model.tensor import Tensor

KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "pooling_type",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "vocab_size",
}
KV_HEADS = "attention.head_count_kv"  # one number, or one per layer
RMS_EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
EXPERTS = {  # keys of MoE families
    "expert_feed_forward_length",
    "expert_gating_func",
    "expert_group_count",
    "expert_group_used_count",
    "expert_weights_norm",
    "expert_weights_scale",
}
SCORINGS: dict[int, Literal["softmax", "sigmoid", "softmax_top_k"]] = {1: "softmax", 2: "sigmoid", 3: "softmax_top_k"}
POOLINGS = ("mean", "mean", "cls", "last")  # the index is GGUF's number; 0 means none and counts as mean
SECTIONS = "rope.dimension_sections"  # pairs rotated by time, height and width; in text all three are the position
WINDOW = "attention.sliding_window"  # optional, in some families
PATTERN = "attention.sliding_window_pattern"  # which layers have a window


def read_decoder(
    config: ConfigReader,
    tensors: Mapping[str, Tensor],
    arch: str,
    *,
    interleaved: bool,
    partial: bool = False,
    eps_key: str = RMS_EPS,
    keys: Collection[str] = (),
    hidden_key: str = "feed_forward_length",
    experts: bool = False,
) -> ModelSpec:
    """Reads the metadata that all families share. `keys` are the family's extra keys. `interleaved` and `partial` (RoPE
    on part of a head) describe its RoPE. `experts` allows experts, whose keys the family reads.
    """
    config.refuse_others(KEYS.union(keys, (eps_key,), EXPERTS if experts else ()))
    if not experts:
        config.require("expert_count", (0,), 0)
    dim, heads = config.size("embedding_length"), config.size("attention.head_count")
    head_dim = config.size("attention.key_length", dim // heads, most=rope.MAX_DIMS)
    config.require("attention.value_length", (head_dim,), head_dim)
    config.array(SECTIONS, COUNTS)
    rotated = config.size("rope.dimension_count", head_dim, most=head_dim)
    if rotated % 2 or not partial:
        config.require("rope.dimension_count", (head_dim,), head_dim)
    max_len = config.size("context_length")
    if "token_embd.weight" not in tensors:
        raise MalformedFile(
            "the file has no tensor 'token_embd.weight'; it may be a part of a model, or of another kind"
        )
    return ModelSpec(
        arch=arch,
        layers=config.size("block_count", most=MAX_LAYERS),
        dim=dim,
        hidden=config.size(hidden_key),
        vocab=tensors["token_embd.weight"].shape[0],
        max_len=max_len,
        eps=config.number(eps_key),
        attn=AttentionSpec(
            heads=heads,
            kv_heads=config.size(KV_HEADS, heads),
            head_dim=head_dim,
            rope=replace(read_rope(config, tensors, rotated, max_len), interleaved=interleaved),
        ),
        tied="output.weight" not in tensors,
        pooling=read_pooling(config),
    )


def read_experts(config: ConfigReader, spec: ModelSpec, *, scoring: int = 1, renormalize: bool = True) -> ExpertSpec:
    """Reads the expert sizes and selection; `scoring` and `renormalize` are defaults."""
    kind = config.size("expert_gating_func", scoring)
    if kind not in SCORINGS:
        raise config.unsupported("expert_gating_func", kind, SCORINGS)
    return ExpertSpec(
        count=config.size("expert_count", most=MAX_EXPERTS),
        top_k=config.size("expert_used_count", most=MAX_EXPERTS),
        hidden=config.size("expert_feed_forward_length", spec.hidden),
        act=spec.act,
        scoring=SCORINGS[kind],
        renormalize=config.flag("expert_weights_norm", renormalize),
        scale=config.number("expert_weights_scale", 1.0, least=0.0) or 1.0,
        groups=config.size("expert_group_count", 1),
        top_k_groups=config.size("expert_group_used_count", 1),
    )


def read_attentive(config: ConfigReader) -> tuple[ConfigReader, list[bool]]:
    """Reads which layers have attention, where others have 0 KV heads. Returns it with a reader that sees a single
    number of KV heads.
    """
    counts, layers = config.array(KV_HEADS, COUNTS), config.size("block_count", most=MAX_LAYERS)
    if len(counts) != layers or len({*counts} - {0}) != 1:
        raise config.unsupported(KV_HEADS, list(counts), (f"0 or the same number for {layers} layers",))
    return config.having(**{KV_HEADS: max(counts)}), [count > 0 for count in counts]


def read_pooling(config: ConfigReader) -> str:
    config.require("pooling_type", tuple(range(len(POOLINGS))), 0)
    return POOLINGS[int(config.number("pooling_type", 0.0, least=0.0))]


def read_window(config: ConfigReader) -> int:
    """Reads the attention window; 0: none."""
    return config.size(WINDOW) if WINDOW in config else 0


def read_sliding(config: ConfigReader, layers: int, period: int) -> Sequence[bool]:
    """Reads which layers have a window: a flag per layer, or all except each nth."""
    if type(config.raw(PATTERN)) is list:
        return config.array(PATTERN, FLAGS, layers)
    return all_but_each(config.size(PATTERN, period), layers)


def read_rope(
    config: ConfigReader, tensors: Mapping[str, Tensor], dims: int, max_len: int, whole: bool = True
) -> RopeSpec:
    """Reads the rotary embedding; `whole`: see rope.yarn."""
    base = config.number("rope.freq_base", 10000.0, least=1.001)
    factor = config.number("rope.scaling.factor", config.number("rope.scale_linear", 1.0))
    freqs = rope.plain(base, dims)
    if "rope_freqs.weight" in tensors:
        freqs = rope.divided(freqs, read_factors(tensors["rope_freqs.weight"], dims // 2))
    match config.text("rope.scaling.type", "linear"):
        case "none":
            return RopeSpec(freqs, interleaved=True)
        case "linear":
            return RopeSpec(rope.linear(freqs, factor), interleaved=True)
        case "yarn":
            return read_yarn(config, freqs, base, factor, max_len, whole)
        case kind:
            raise config.unsupported("rope.scaling.type", kind, ("none", "linear", "yarn"))


def read_yarn(
    config: ConfigReader, freqs: rope.Freqs, base: float, factor: float, max_len: int, whole: bool
) -> RopeSpec:
    stretched = rope.yarn(
        freqs,
        base=base,
        factor=factor,
        original=config.size("rope.scaling.original_context_length", max_len),
        fast=config.number("rope.scaling.yarn_beta_fast", 32.0),
        slow=config.number("rope.scaling.yarn_beta_slow", 1.0),
        whole=whole,
    )
    scale = config.number("rope.scaling.attn_factor", 1.0) * rope.yarn_scale(factor)
    return RopeSpec(stretched, interleaved=True, scale=scale)


def read_factors(tensor: Tensor, count: int) -> rope.Freqs:
    if tensor.shape != (count,):
        raise MalformedFile(f"tensor {tensor.name!r} has shape {tensor.shape}; the model's config needs {(count,)}")
    factors = tuple(dequantize(tensor).tolist())
    if not all(factor > 0 for factor in factors):
        raise MalformedFile(f"tensor {tensor.name!r} holds {min(factors)}; every factor must be above 0")
    return factors
