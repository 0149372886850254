"""Reads OLMo 2 and 3: norms after attention and MLP instead of before them, and norms over all of q and all of k. OLMo
3 has windows in three of four layers, with unscaled RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from penstock.model import config_hf, decoder, names, rope
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec, RopeSpec, all_but_each
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    after_attn_norm="post_attention_layernorm",
    after_mlp_norm="post_feedforward_layernorm",
)
GGUF = names.GGUF.but(
    q_norm="attn_q_norm", k_norm="attn_k_norm", after_attn_norm="post_attention_norm", after_mlp_norm="post_ffw_norm"
)
KEYS = (gguf_config.WINDOW, gguf_config.PATTERN, "rope.freq_base_swa")
PERIOD, THETA = 4, 500000.0
build = partial(decoder.build, pre_norm=False, post_norm=True)


def read_hf(config: ConfigReader) -> ModelSpec:
    config.number("rms_norm_eps")  # required: the default differs from other families
    if config.strings("architectures") == ["Olmo3ForCausalLM"]:
        return read_olmo3(config)
    return normed(replace(config_hf.read_decoder(config, "olmo2"), biases=config_hf.read_biases(config)))


def read_olmo3(config: ConfigReader) -> ModelSpec:
    both = config_hf.read_two_ropes(config, THETA)
    far, near = both or (None, config.number("rope_theta", THETA, least=1.001))
    spec = config_hf.read_decoder(config, "olmo2", theta=THETA, scaling=far)
    spec = normed(replace(spec, biases=config_hf.read_biases(config)))
    sliding = config_hf.read_sliding(config, all_but_each(PERIOD, spec.layers))
    return in_layers(spec, sliding, config_hf.read_window(config, 4096), near)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = normed(gguf_config.read_decoder(config, tensors, "olmo2", interleaved=False, keys=KEYS))
    base = config.number("rope.freq_base", 10000.0, least=1.001)
    near = config.number("rope.freq_base_swa", base, least=1.001)
    sliding = gguf_config.read_sliding(config, spec.layers, PERIOD)
    return in_layers(spec, sliding, gguf_config.read_window(config), near)


def in_layers(spec: ModelSpec, sliding: Sequence[bool], window: int, base: float) -> ModelSpec:
    if not window:
        return spec
    far = spec.attn
    unscaled = RopeSpec(rope.plain(base, far.head_dim), far.rope.interleaved)
    near = replace(far, window=window, rope=unscaled)
    return spec.with_attention([near if one else far for one in sliding])


def normed(spec: ModelSpec) -> ModelSpec:
    return replace(spec, attn=replace(spec.attn, qk_norm="all"))
