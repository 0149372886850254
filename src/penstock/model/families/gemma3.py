"""Reads Gemma 3 (text only): Gemma 2 with QK norms per head instead of soft caps. Every sixth layer has full attention
and its own RoPE. EmbeddingGemma is bidirectional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.model import config_hf, names, rope
from penstock.model.config_reader import ConfigReader, number_or_null
from penstock.model.families import gemma2
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec, RopeSpec, all_but_each
from penstock.model.tensor import Tensor

HUGGING_FACE = names.beside_vision(gemma2.HUGGING_FACE.but(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"))
GGUF = gemma2.GGUF.but(q_norm="attn_q_norm", k_norm="attn_k_norm")
KEYS = (gguf_config.WINDOW, "attention.sliding_window_pattern", "rope.freq_base_swa", gemma2.LOGITS)
PERIOD, THETA, LOCAL_THETA = 6, 1000000.0, 10000.0
LARGEST = 62
SILENT = {  # defaults for published vision configs
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
}
build = gemma2.build


def read_hf(config: ConfigReader) -> ModelSpec:
    if "text_config" in config:
        return config_hf.read_text_part(config, read_text, SILENT)
    return read_text(config)


def read_text(config: ConfigReader) -> ModelSpec:
    both = config_hf.read_two_ropes(config, LOCAL_THETA)
    far, near = both or (None, config.number("rope_local_base_freq", LOCAL_THETA, least=1.001))
    spec = config_hf.read_decoder(config, "gemma3", tied=True, theta=THETA, act_key="hidden_activation", scaling=far)
    spec = gemma2.read_rest(config, gemma2.scaled(spec))
    caps = (number_or_null(config, key, 0.0) for key in gemma2.CAPS)
    period = config.size("sliding_window_pattern", config.size("_sliding_window_pattern", PERIOD))
    sliding = config_hf.read_sliding(config, all_but_each(period, spec.layers))
    spec, window = gemma2.capped(spec, *caps), config.size("sliding_window", 4096)
    if config.flag("use_bidirectional_attention", False):
        spec, window = to_both_sides(spec, window)
    return in_layers(spec, sliding, window, near)


def to_both_sides(spec: ModelSpec, window: int) -> tuple[ModelSpec, int]:
    return replace(spec, attn=replace(spec.attn, causal=False)), window // 2 + 1


def read_gguf(
    config: ConfigReader, tensors: Mapping[str, Tensor], *, keys: Sequence[str] = KEYS, encoder: bool = False
) -> ModelSpec:
    spec = gemma2.scaled(gguf_config.read_decoder(config, tensors, "gemma3", interleaved=False, keys=keys))
    spec = gemma2.capped(spec, 0.0, number_or_null(config, gemma2.LOGITS, 0.0))
    spec = replace(spec, attn=replace(spec.attn, multiplier=gemma2.score_scale(spec, LARGEST)))
    sliding = all_but_each(config.size("attention.sliding_window_pattern", PERIOD), spec.layers)
    base = config.number("rope.freq_base_swa", LOCAL_THETA, least=1.001)
    window = config.size(gguf_config.WINDOW)
    if encoder:
        spec, window = to_both_sides(spec, window)
    return in_layers(spec, sliding, window, base)


def in_layers(spec: ModelSpec, sliding: Sequence[bool], window: int, base: float) -> ModelSpec:
    far = replace(spec.attn, qk_norm="head")
    near = replace(far, window=window, rope=RopeSpec(rope.plain(base, far.head_dim), far.rope.interleaved))
    return spec.with_attention([near if one else far for one in sliding])
