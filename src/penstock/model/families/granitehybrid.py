"""Reads Granite 4: Mamba2 in most layers and attention in the others, with or without RoPE, each followed by an MLP or
by experts with a shared one. Bamba's GGUF files also use this architecture name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import granite, granitemoe, mamba2_mixer
from penstock.model.gguf import config as gguf_config
from penstock.model.packer import Packer
from penstock.model.spec import ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = granitemoe.HUGGING_FACE.but(**mamba2_mixer.within("mamba"))
GGUF = names.GGUF.but(**mamba2_mixer.GGUF_PARTS)
KEYS = (*granite.KEYS, *mamba2_mixer.GGUF_KEYS, granitemoe.SHARED_SIZE)
NO_ROPE = RopeSpec((), interleaved=False)


def mlp(spec: ModelSpec, pack: Packer, layer: int) -> decoder.Part:
    """Builds a layer's experts or its MLP, which Hugging Face folders call a shared MLP even without experts."""
    name = f"layers.{layer}.shared"
    if spec.experts is None and any(pack.has(f"{name}.{part}") for part in ("up", "down")):
        return decoder.mlp(spec, pack, name, spec.hidden)
    return decoder.mlp_or_experts(spec, pack, layer)


build = partial(decoder.build, mixer=mamba2_mixer.mixer, mlp=mlp)


def read_hf(config: ConfigReader) -> ModelSpec:
    config.require("hidden_act", ("silu",), "silu")
    config.require("position_embedding_type", ("rope", "nope"), "nope")
    config.require("normalization_function", ("rmsnorm",), "rmsnorm")
    config.ignore("init_method")
    spec, eps = granite.read_hf(config), config.number("rms_norm_eps", 1e-6)
    mamba = mamba2_mixer.read_hf(config, eps, config.size("mamba_expand", 2) * spec.dim)
    recurrent = mamba2_mixer.read_kinds(config, spec.layers)
    if len(recurrent) == spec.layers:
        raise config.unsupported("layer_types", "no attention", ("attention in one layer or more",))
    biases = (spec.biases or frozenset()) | mamba2_mixer.read_biases(config)
    spec = replace(spec, arch="granitehybrid", biases=biases, shared_hidden=config.size("shared_intermediate_size"))
    if config.text("position_embedding_type", "nope") == "nope":
        spec = replace(spec, attn=replace(spec.attn, rope=NO_ROPE))
    return read_experts(config, mamba2_mixer.with_mamba2(spec, mamba, recurrent))


def read_experts(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    if config.count("num_local_experts", 8) == 0:
        config.count("num_experts_per_tok", 0)
        config.ignore("output_router_logits", "router_aux_loss_coef")
        return replace(spec, hidden=spec.shared_hidden, shared_hidden=0)
    experts = config_hf.read_experts(config, spec, count="num_local_experts", hidden="intermediate_size")
    return replace(spec, experts=replace(experts, renormalize=True))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    scalar, attentive = gguf_config.read_attentive(config)
    spec = gguf_config.read_decoder(
        scalar, tensors, "granitehybrid", interleaved=True, partial=True, keys=KEYS, experts=True
    )
    mamba = mamba2_mixer.read_gguf(config, spec.eps)
    spec = granite.read_scales(config, spec)
    if not config.flag("rope.scaling.finetuned", True):
        spec = replace(spec, attn=replace(spec.attn, rope=NO_ROPE))
    shared = config.count(granitemoe.SHARED_SIZE, 0)
    if config.count("expert_count", 0):
        spec = replace(spec, experts=gguf_config.read_experts(config, spec), shared_hidden=shared)
    recurrent = frozenset(i for i, one in enumerate(attentive) if not one)
    return mamba2_mixer.with_mamba2(spec, mamba, recurrent)
