"""Reads LFM2, dense or with experts, and the text part of LFM2-VL: most layers have a gated short convolution, the
others attention with QK norms. Experts are sigmoid-scored with a selection bias, and the first layers have plain MLPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.errors import UnsupportedModel
from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import COUNTS, ConfigReader
from penstock.model.gguf import config as gguf_config
from penstock.model.ops import ConvWeights, Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.recurrence import ConvSpec
from penstock.model.spec import ExpertSpec, ModelSpec
from penstock.model.tensor import Tensor

CONV, FULL = "conv", "full_attention"
HUGGING_FACE = names.beside_vision(
    names.HUGGING_FACE.but(
        attn_norm="operator_norm",
        mlp_norm="ffn_norm",
        o="self_attn.out_proj",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        conv_in="conv.in_proj",
        conv="conv.conv",
        conv_o="conv.out_proj",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
        router="feed_forward.gate",
        choice_bias="feed_forward.expert_bias",
        **{
            "experts.*.gate": "feed_forward.experts.*.w1",
            "experts.*.up": "feed_forward.experts.*.w3",
            "experts.*.down": "feed_forward.experts.*.w2",
        },
    )._replace(top={"model.embed_tokens": "embed", "model.embedding_norm": "norm", "lm_head": "head"})
)
GGUF = names.GGUF.but(
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    conv_in="shortconv.in_proj",
    conv="shortconv.conv",
    conv_o="shortconv.out_proj",
)._replace(top={"token_embd": "embed", "token_embd_norm": "norm", "output": "head"})
PROJECTOR = (
    *("projector_bias", "projector_hidden_size", "projector_use_layernorm", "downsample_factor"),
    *("do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_num_patches", "max_pixels_tolerance"),
    *("max_tiles", "min_image_tokens", "min_tiles", "tile_size", "use_image_special_tokens", "use_thumbnail"),
)
INITIAL = (  # initialization, or repeated sizes
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
    *("block_dim", "conv_dim", "conv_dim_out", "num_heads", "block_norm_eps", "theta"),
)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Computes a gated short convolution with its projections."""

    layer: int  # index among layers with a state
    spec: ConvSpec
    bcx: Weight
    weights: ConvWeights
    o: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        mixed = ops.causal_conv(self.layer, ops.linear(x, self.bcx), self.weights, self.spec)
        return ops.linear(mixed, self.o)


def mixer(spec: ModelSpec, pack: Packer, layer: int) -> decoder.Part:
    if layer not in spec.recurrent:
        return decoder.attention(spec, pack, layer)
    conv, name = spec.recurrence, f"layers.{layer}"
    assert isinstance(conv, ConvSpec)
    return ShortConv(
        layer=spec.state_layer(layer),
        spec=conv,
        bcx=pack.matrix((f"{name}.conv_in", 3 * conv.width), width=spec.dim),
        weights=conv_weights(conv, pack, name),
        o=pack.matrix((f"{name}.conv_o", spec.dim), width=conv.width),
    )


def conv_weights(conv: ConvSpec, pack: Packer, name: str) -> ConvWeights:
    bias = pack.vector(f"{name}.conv.bias", conv.width) if pack.has(f"{name}.conv.bias") else None
    return ConvWeights(pack.vector(f"{name}.conv", conv.width * conv.conv_width), bias)


build = partial(decoder.build, mixer=mixer)


# ---- configs ----


def read_hf(config: ConfigReader) -> ModelSpec:
    if "text_config" in config:
        config.ignore(*PROJECTOR)
        return config_hf.read_text_part(config, read_text)
    return read_text(config)


def read_text(config: ConfigReader) -> ModelSpec:
    config.number("norm_eps")  # required: the default differs from other families
    config.ignore(*INITIAL)
    config.require("block_use_swiglu", (True,), True)
    config.require("use_pos_enc", (True,), True)
    experts = "num_experts" in config
    key = "intermediate_size"
    if "block_ff_dim" in config:
        config.ignore(key)
        key = "block_ff_dim"
    spec = config_hf.read_decoder(config, "lfm2", eps_key="norm_eps", tied=True, theta=1e6, hidden_key=key)
    spec = replace(spec, tied=config.flag("tie_embedding", spec.tied))
    conv = ConvSpec(spec.dim, config.size("conv_L_cache", 3), gated=True)
    biases = ("conv_in", "conv", "conv_o") if config.flag("conv_bias", False) else ()
    spec = replace(in_layers(spec, conv, read_recurrent(config, spec.layers)), biases=frozenset(biases))
    return with_experts(spec, *read_experts(config, spec)) if experts else with_adjusted_width(config, spec)


def with_adjusted_width(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """Returns the spec with the effective MLP width: two thirds of the config's, times a factor, rounded up."""
    multiple, scaled = config.size("block_multiple_of", 256), not config.says_null("block_ffn_dim_multiplier")
    factor = config.number("block_ffn_dim_multiplier", 1.0)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return spec
    hidden = int(2 * spec.hidden / 3)
    return replace(spec, hidden=-(-int(factor * hidden) // multiple) * multiple if scaled else hidden)


def read_recurrent(config: ConfigReader, layers: int) -> Sequence[bool]:
    if "layer_types" not in config:
        attentive = config.array("full_attn_idxs", COUNTS) if "full_attn_idxs" in config else range(layers)
        return [layer not in attentive for layer in range(layers)]
    config.array("full_attn_idxs", COUNTS)
    kinds = config.strings("layer_types")
    if len(kinds) != layers or not {CONV, FULL}.issuperset(kinds):
        raise config.unsupported("layer_types", kinds, (f"{CONV} or {FULL} for each layer",))
    return [kind == CONV for kind in kinds]


def read_experts(config: ConfigReader, spec: ModelSpec) -> tuple[ExpertSpec, int]:
    experts = config_hf.read_experts(config, spec, count="num_experts", hidden="moe_intermediate_size")
    made = replace(
        experts,
        scoring="sigmoid",
        renormalize=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        choice_bias=config.flag("use_expert_bias", True),
    )
    return made, config.count("num_dense_layers", 2)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    experts = "expert_count" in config
    scalar, attentive = gguf_config.read_attentive(config)
    spec = gguf_config.read_decoder(
        scalar,
        tensors,
        "lfm2",
        interleaved=False,
        keys=("shortconv.l_cache", "leading_dense_block_count"),
        experts=experts,
    )
    conv = ConvSpec(spec.dim, config.size("shortconv.l_cache"), gated=True)
    spec = in_layers(replace(spec, biases=frozenset()), conv, [not one for one in attentive])
    if not experts:
        return spec
    made = replace(gguf_config.read_experts(config, spec, scoring=2), choice_bias=True)
    return with_experts(spec, made, config.count("leading_dense_block_count", 0))


def in_layers(spec: ModelSpec, conv: ConvSpec, recurrent: Sequence[bool]) -> ModelSpec:
    if all(recurrent):
        raise UnsupportedModel("no layer of this model has attention; a model needs one layer that has it")
    attn = replace(spec.attn, qk_norm="head")
    return replace(spec, attn=attn, recurrence=conv, recurrent=frozenset(i for i, one in enumerate(recurrent) if one))


def with_experts(spec: ModelSpec, experts: ExpertSpec, dense: int) -> ModelSpec:
    """Returns the spec with experts in all layers except the first `dense` ones."""
    return replace(spec, experts=experts, dense=frozenset(range(min(dense, spec.layers))))
