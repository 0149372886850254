"""Reads gpt-oss: attention sinks, windows in every other layer, biases everywhere, and experts with clamped gates,
which stay in MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ExpertSpec, ModelSpec, all_but_each
from penstock.model.tensor import Tensor

UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
HUGGING_FACE = names.HUGGING_FACE.but(sinks="self_attn.sinks", router="mlp.router")
HUGGING_FACE = HUGGING_FACE._replace(
    parts={
        **HUGGING_FACE.parts,
        UP: "experts.interleaved_transposed",  # float checkpoints; those in MXFP4 are not transposed
        DOWN: "experts.down_transposed",
        f"{UP}.weight": "experts.interleaved",
        f"{DOWN}.weight": "experts.down",
        f"{UP}_bias": "experts.interleaved.bias",
        f"{DOWN}_bias": "experts.down.bias",
    }
)
GGUF = names.GGUF.but(sinks="attn_sinks", mlp_norm="post_attention_norm")
BIASES = frozenset(("q", "k", "v", "o", "router", "gate", "up", "down"))
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    config.require("attention_bias", (True,), True)
    config.require("swiglu_limit", (7,), 7)
    config.require("swiglu_alpha", (1.702,), 1.702)
    config.ignore("initial_context_length", "experts_per_token")  # repeated elsewhere
    config.size("head_dim")  # required: the default is 64, not the width divided by the heads
    spec = config_hf.read_decoder(config, "gptoss", theta=150000.0)
    experts = config_hf.read_experts(config, spec, count="num_local_experts", hidden="intermediate_size")
    window = config_hf.read_window(config, 128)
    sliding = config_hf.read_sliding(config, all_but_each(2, spec.layers))
    return with_experts(spec, experts, sliding, window)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(
        config, tensors, "gptoss", interleaved=False, experts=True, keys=(gguf_config.WINDOW,)
    )
    head_dim = spec.attn.head_dim
    rotation = gguf_config.read_rope(config, tensors, head_dim, spec.max_len, whole=False)
    spec = replace(spec, attn=replace(spec.attn, rope=replace(rotation, interleaved=False)))
    experts = gguf_config.read_experts(config, spec, scoring=3, renormalize=False)
    return with_experts(spec, experts, all_but_each(2, spec.layers), gguf_config.read_window(config))


def with_experts(spec: ModelSpec, experts: ExpertSpec, sliding: Sequence[bool], window: int) -> ModelSpec:
    return replace(
        spec,
        attn=replace(spec.attn, sinks=True),
        biases=BIASES,
        experts=replace(experts, act="clamped", scoring="softmax_top_k", renormalize=False),
    ).with_windows(sliding, window)
