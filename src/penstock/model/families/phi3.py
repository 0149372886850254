"""Reads Phi-3 and Phi-4: Llama with q, k and v in one tensor, gate and up in another, and a RoPE that may rotate a part
of a head.

With `longrope`, frequencies depend on whether a sequence has grown beyond the original context, and keys that are in
the cache already would have to be rotated again. So the context ends where the original one does, and the log says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names, rope
from penstock.model.config_reader import ConfigReader
from penstock.model.families import llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
GGUF = names.GGUF.but(qkv="attn_qkv", gate_up="ffn_up")._replace(
    ignored=re.compile(r"rope_factors_(long|short)\.weight")
)
SHORT = "rope_factors_short.weight"
ORIGINAL = "original_max_position_embeddings"
LONGROPE = ("rope_type", "type", "long_factor", "short_factor", "factor", "attention_factor", ORIGINAL)
build = llama.build


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
        short = fields.numbers("short_factor", len(plain.attn.rope.inv_freq))
        spec = within_original_context(plain, original, short, fields.number("attention_factor", scale))
    else:
        spec = config_hf.read_decoder(config, "phi3", partial=True)
    return spec.with_windows([True] * spec.layers, config_hf.read_window(config, silent=0))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    keys = (gguf_config.WINDOW,)
    spec = gguf_config.read_decoder(config, tensors, "phi3", interleaved=False, partial=True, keys=keys)
    if SHORT in tensors:
        short = gguf_config.read_factors(tensors[SHORT], len(spec.attn.rope.inv_freq))
        original = config.size("rope.scaling.original_context_length")
        spec = within_original_context(spec, original, short, config.number("rope.scaling.attn_factor", 1.0))
    return spec.with_windows([True] * spec.layers, gguf_config.read_window(config))


def within_original_context(spec: ModelSpec, original: int, factors: rope.Freqs, scale: float) -> ModelSpec:
    """Returns the spec with the RoPE that longrope has up to the original context, and with that context."""
    if original < spec.max_len:
        import logging  # takes longer than reading the rest

        logging.getLogger(__name__).warning(
            "the context is %d, not %d: beyond it, longrope would rotate every cached key again", original, spec.max_len
        )
    rotation = RopeSpec(rope.divided(spec.attn.rope.inv_freq, factors), interleaved=False, scale=scale)
    return replace(spec, max_len=min(original, spec.max_len), attn=replace(spec.attn, rope=rotation))
