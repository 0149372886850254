"""Reads Cohere's Command R7B and Command A: Command R with sliding windows; every fourth layer has full attention and
no RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import cohere
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec, RopeSpec, all_but_each
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE
GGUF = names.GGUF
PERIOD = 4
SAID_OTHERWISE = {  # published configs repeat the architecture in these fields
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
}
build = cohere.build


def read_hf(config: ConfigReader) -> ModelSpec:
    for key, value in SAID_OTHERWISE.items():
        config.require(key, (value,), value)
    config.require("use_qk_norm", (False,), False)
    spec = cohere.read_as("cohere2", config, theta=10000.0)
    period = config.size("layer_switch", config.size("sliding_window_pattern", PERIOD))
    sliding = config_hf.read_sliding(config, all_but_each(period, spec.layers))
    return in_layers(spec, sliding, config.size("sliding_window", 4096))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = cohere.read_file("cohere2", config, tensors, gguf_config.WINDOW, gguf_config.PATTERN)
    return in_layers(spec, gguf_config.read_sliding(config, spec.layers, PERIOD), config.size(gguf_config.WINDOW))


def in_layers(spec: ModelSpec, sliding: Sequence[bool], window: int) -> ModelSpec:
    near = replace(spec.attn, window=window)
    far = replace(spec.attn, rope=RopeSpec((), spec.attn.rope.interleaved))
    return spec.with_attention([near if one else far for one in sliding])
