"""Reads Phi-3 and Phi-4: Llama with fused q, k and v, fused gate and up, and RoPE on all or part of each head.

With `longrope`, a model has short RoPE factors for its original context and long ones beyond. Cached keys are rotated
for good, so all sequences share one choice: long factors if `--max-len` exceeds the original context, else short ones.
Without `--max-len`, the context is the original one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from penstock.model import config_hf, names, rope
from penstock.model.config_reader import NUMBERS, ConfigReader
from penstock.model.families import llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import LongContext, ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
GGUF = names.GGUF.but(qkv="attn_qkv", gate_up="ffn_up")._replace(
    ignored=re.compile(r"rope_factors_(long|short)\.weight")
)
SHORT = "rope_factors_short.weight"
LONG = "rope_factors_long.weight"
ORIGINAL = "original_max_position_embeddings"
LONGROPE = ("rope_type", "type", "long_factor", "short_factor", "factor", "attention_factor", ORIGINAL)
build = llama.build


class LongRopeFactors(NamedTuple):
    """Holds LongRoPE's divisors of each frequency, within the original context and beyond it."""

    short: rope.Freqs
    long: rope.Freqs


def read_hf(config: ConfigReader) -> ModelSpec:
    for bias in ("attention_bias", "lm_head_bias", "mlp_bias"):
        config.require(bias, (False,), False)
    for other in ("full_attn_mod", "interpolate_factor"):
        config.require(other, (1,), 1)
    fields = config_hf.rope_fields(config)
    if fields.text("rope_type", fields.text("type", "default")) in ("longrope", "su"):
        plain = config_hf.read_decoder(config, "phi3", partial=True, scaling=fields.without(*LONGROPE))
        original = fields.size(ORIGINAL, config.size(ORIGINAL, plain.max_len))
        scale = rope.longrope_scale(fields.number("factor", plain.max_len / original), original)
        pairs = len(plain.attn.rope.inv_freq)
        factors = LongRopeFactors(*(fields.array(key, NUMBERS, pairs) for key in ("short_factor", "long_factor")))
        spec = with_factors(plain, original, factors, fields.number("attention_factor", scale))
    else:
        spec = config_hf.read_decoder(config, "phi3", partial=True)
    return spec.with_windows([True] * spec.layers, config_hf.read_window(config, silent=0))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    keys = (gguf_config.WINDOW,)
    spec = gguf_config.read_decoder(config, tensors, "phi3", interleaved=False, partial=True, keys=keys)
    if {SHORT, LONG} & set(tensors):
        pairs = len(spec.attn.rope.inv_freq)
        factors = LongRopeFactors(*(gguf_config.read_factors(tensors[name], pairs) for name in (SHORT, LONG)))
        original = config.size("rope.scaling.original_context_length")
        spec = with_factors(spec, original, factors, config.number("rope.scaling.attn_factor", 1.0))
    return spec.with_windows([True] * spec.layers, gguf_config.read_window(config))


def with_factors(spec: ModelSpec, original: int, factors: LongRopeFactors, scale: float) -> ModelSpec:
    plain = spec.attn.rope.inv_freq
    short, long = (RopeSpec(rope.divided(plain, one), interleaved=False, scale=scale) for one in factors)
    if original >= spec.max_len:
        return replace(spec, attn=replace(spec.attn, rope=short))
    return replace(
        spec, max_len=original, attn=replace(spec.attn, rope=short), long=LongContext(spec.max_len, rope=long)
    )
