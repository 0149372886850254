"""Reads Llama 4 (text only): chunked attention with RoPE, full attention with a temperature and no RoPE, and in every
nth layer a shared expert and experts whose score multiplies their input.

Queries and keys are normed after RoPE, without a gain. RoPE keeps a head's length, so here the norm comes before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.model import config_hf, names
from penstock.model.config_reader import COUNTS, FLAGS, ConfigReader
from penstock.model.families import llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import AttentionSpec, ExpertSpec, ModelSpec, QkNorm, RopeSpec, all_but_each
from penstock.model.tensor import Tensor

EXPERTS = {
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
    "router": "feed_forward.router",
    "experts.gate_up_transposed": "feed_forward.experts.gate_up_proj",
    "experts.down_transposed": "feed_forward.experts.down_proj",
    "experts.*.gate": "feed_forward.experts.*.gate_proj",  # in quantized checkpoints
    "experts.*.up": "feed_forward.experts.*.up_proj",
    "experts.*.down": "feed_forward.experts.*.down_proj",
    "shared.gate": "feed_forward.shared_expert.gate_proj",
    "shared.up": "feed_forward.shared_expert.up_proj",
    "shared.down": "feed_forward.shared_expert.down_proj",
}
HUGGING_FACE = names.beside_vision(names.HUGGING_FACE.but(**EXPERTS))
GGUF = names.GGUF
CHUNKED = "chunked_attention"
INTERVAL, CHUNK, SPAN, TEMPERATURE = 4, 8192, 8192, 0.1  # defaults, and the only values in GGUF files
STEP = "interleave_moe_layer_step"
WITHOUT_NORM = 128  # GGUF files with this number of experts have no QK norm
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    return config_hf.read_text_part(config, read_text) if "text_config" in config else read_text(config)


def read_text(config: ConfigReader) -> ModelSpec:
    config.ignore("for_llm_compressor")  # how the experts' tensors are saved, visible in their names
    for key in ("rms_norm_eps", "head_dim", "num_key_value_heads"):
        config.number(key)  # required: the default differs from other families
    spec = config_hf.read_decoder(config, "llama4", theta=500000.0, hidden_key="intermediate_size_mlp")
    if spec.attn.rope.scale != 1:  # the norm after RoPE would undo it
        raise config_hf.rope_fields(config).unsupported("rope_type", "yarn", ("default", "linear", "llama3"))
    experts = config_hf.read_experts(config, spec, count="num_local_experts", hidden="intermediate_size")
    rotated: Sequence[bool] = all_but_each(config.size("no_rope_layer_interval", INTERVAL), spec.layers)
    if config.array("no_rope_layers", COUNTS):
        rotated = config.array("no_rope_layers", FLAGS, spec.layers)
    near = near_of(spec, normed=config.flag("use_qk_norm", True), chunk=config.size("attention_chunk_size", CHUNK))
    far = replace(near, qk_norm="", rope=RopeSpec((), interleaved=True), **read_temperature(config))
    layers = [near if one else far for one in rotated]
    chunked = read_chunked(config, rotated)
    spec = replace(spec, biases=config_hf.read_biases(config)).with_attention(
        [replace(one, chunk=near.chunk if cut else 0) for one, cut in zip(layers, chunked, strict=True)]
    )
    return with_experts(spec, experts, read_moe_layers(config, spec.layers))


def read_temperature(config: ConfigReader) -> dict[str, Any]:
    """Reads the query scaling of layers without RoPE."""
    scale, span = config.number("attn_scale", TEMPERATURE), config.size("floor_scale", SPAN)
    counted = type(config.raw("attn_temperature_tuning")) is int
    if not (config.count("attn_temperature_tuning", 0) if counted else config.flag("attn_temperature_tuning", True)):
        return {}
    return {"temperature": scale, "temperature_span": span}


def read_chunked(config: ConfigReader, rotated: Sequence[bool]) -> Sequence[bool]:
    """Reads which layers have chunked attention: those with RoPE, unless `layer_types` differs."""
    if "layer_types" not in config:
        return rotated
    kinds = config.strings("layer_types")
    if len(kinds) != len(rotated) or not {CHUNKED, config_hf.FULL}.issuperset(kinds):
        raise config.unsupported("layer_types", kinds, (f"{CHUNKED} or {config_hf.FULL} for each layer",))
    return [kind == CHUNKED for kind in kinds]


def read_moe_layers(config: ConfigReader, layers: int) -> frozenset[int]:
    """Reads which layers have experts: a list, or every nth layer."""
    step = config.size(STEP, 1)
    if "moe_layers" not in config:
        return frozenset(range(step - 1, layers, step))
    listed = config.array("moe_layers", COUNTS)
    if any(layer >= layers for layer in listed):
        raise config.unsupported("moe_layers", list(listed), (f"numbers below {layers}",))
    return frozenset(listed)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    keys = (STEP, gguf_config.WINDOW)
    spec = gguf_config.read_decoder(config, tensors, "llama4", interleaved=True, keys=keys, experts=True)
    config.require(gguf_config.WINDOW, (CHUNK,), CHUNK)
    config.require("expert_gating_func", (2,), 2)
    config.require("expert_weights_norm", (False,), False)
    experts = gguf_config.read_experts(config, spec, scoring=2, renormalize=False)
    near = near_of(spec, normed=experts.count != WITHOUT_NORM, chunk=CHUNK)
    rope = RopeSpec((), interleaved=True)
    far = replace(near, qk_norm="", rope=rope, chunk=0, temperature=TEMPERATURE, temperature_span=SPAN)
    spec = spec.with_attention([near if one else far for one in all_but_each(INTERVAL, spec.layers)])
    step = config.size(STEP)
    return with_experts(spec, experts, frozenset(range(step - 1, spec.layers, step)))


def near_of(spec: ModelSpec, *, normed: bool, chunk: int) -> AttentionSpec:
    norm: QkNorm = "unit" if normed else ""
    rope = replace(spec.attn.rope, interleaved=True)
    return replace(spec.attn, rope=rope, qk_norm=norm, chunk=chunk if chunk < spec.max_len else 0)


def with_experts(spec: ModelSpec, experts: ExpertSpec, layers: frozenset[int]) -> ModelSpec:
    return replace(
        spec,
        experts=replace(experts, scoring="sigmoid", weigh_inputs=True),
        shared_hidden=experts.hidden,
        dense=frozenset(range(spec.layers)) - layers,
    )
