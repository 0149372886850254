"""Reads Nemotron-H: each layer is one part: Mamba2, attention without RoPE, an MLP or experts, with squared ReLU. The
multi-token prediction (MTP) layers are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.errors import MalformedFile
from penstock.model import decoder, names
from penstock.model.config_reader import COUNTS, MAX_EXPERTS, MAX_LAYERS, ConfigReader, bounds
from penstock.model.families import mamba2_mixer
from penstock.model.gguf import config as gguf_config
from penstock.model.packer import Packer
from penstock.model.recurrence import Mamba2Spec
from penstock.model.spec import AttentionSpec, ExpertSpec, ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"  # letters of hybrid_override_pattern
KINDS = {
    **{"linear_attention": MAMBA, "mamba": MAMBA, "full_attention": ATTENTION, "attention": ATTENTION},
    **{"mlp": MLP, "moe": EXPERTS},
}
HUGGING_FACE = names.HUGGING_FACE._replace(
    top={
        **{"backbone.embeddings": "embed", "backbone.norm_f": "norm", "lm_head": "head"},
        **{"model.embeddings": "embed", "model.norm_f": "norm"},
    },
    layer=re.compile(rf"(?:backbone|model)\.layers\.{names.NUMBER}\.(.+)"),
    parts={},
    ignored=re.compile(r"mtp\..+"),
).but(
    attn_norm="norm",
    **mamba2_mixer.within("mixer"),
    **{part: f"mixer.{part}_proj" for part in ("q", "k", "v", "o", "up", "down")},
    **{
        "router": "mixer.gate",
        "choice_bias": "mixer.gate.e_score_correction_bias",
        "experts.*.up": "mixer.experts.*.up_proj",
        "experts.*.down": "mixer.experts.*.down_proj",
        "experts.up": "mixer.experts.up_proj",
        "experts.down": "mixer.experts.down_proj",
        "shared.up": "mixer.shared_experts.up_proj",
        "shared.down": "mixer.shared_experts.down_proj",
        "latent_in": "mixer.fc1_latent_proj",
        "latent_out": "mixer.fc2_latent_proj",
    },
)
GGUF = names.GGUF.but(**mamba2_mixer.GGUF_PARTS, latent_in="ffn_latent_down", latent_out="ffn_latent_up")
HIDDEN, LATENT = "feed_forward_length", "moe_latent_size"
SHARED_SIZE, SHARED_COUNT = "expert_shared_feed_forward_length", "expert_shared_count"
KEYS = (
    *mamba2_mixer.GGUF_KEYS,
    *(SHARED_SIZE, SHARED_COUNT, LATENT, gguf_config.LAYER_EPS, "nextn_predict_layers"),
)
NEUTRAL = (  # training, initialization and runtime options
    *("chunk_size", "num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32", "use_mamba_kernels"),
    *("time_step_floor", "time_step_max", "time_step_min", "time_step_rank", "mamba_ssm_cache_dtype"),
    *("moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    *("rope_theta", "partial_rotary_factor", "rms_norm_eps", "norm_eps", "expand"),
)
EXPERT_FIELDS = (  # without effect if there are no experts
    *("moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "n_group", "n_routed_experts"),
    *("n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "topk_group"),
)
NO_ROPE = RopeSpec((), interleaved=False)


def build(spec: ModelSpec, pack: Packer) -> decoder.Decoder:
    def layer(i: int) -> decoder.Block:
        if i in spec.recurrent or i in spec.attention_layers:
            part = mamba2_mixer.mixer(spec, pack, i)
        elif i in spec.dense:
            part = decoder.plain_mlp(spec, pack, i)
        else:
            part = decoder.mlp_or_experts(spec, pack, i)
        return decoder.Block(part, decoder.rms_norm(spec, pack, f"layers.{i}.attn_norm"), None)

    return decoder.Decoder(tuple(layer(i) for i in range(spec.layers)), decoder.ends(spec, pack))


def of_kinds(spec: ModelSpec, mamba: Mamba2Spec, kinds: Sequence[str]) -> ModelSpec:
    layers = {kind: frozenset(i for i, one in enumerate(kinds) if one == kind) for kind in set(KINDS.values())}
    if not layers[ATTENTION]:
        raise MalformedFile("a Nemotron-H model without attention is not supported: none of its layers has any")
    spec = replace(spec, attentive=layers[ATTENTION], dense=layers[MLP])
    if not layers[EXPERTS]:
        spec = replace(spec, experts=None, shared_hidden=0)
    return mamba2_mixer.with_mamba2(spec, mamba, layers[MAMBA])


# ---- configs ----


def read_hf(config: ConfigReader) -> ModelSpec:
    config.ignore(*NEUTRAL)
    for key in ("attention_bias", "use_bias", "mamba_proj_bias", "tie_word_embeddings"):
        config.require(key, (False,), False)
    config.require("mlp_hidden_act", ("relu2",), "relu2")
    config.require("mamba_hidden_act", ("silu",), "silu")
    if "sliding_window" in config:
        config.require("sliding_window", ("null",))
    kinds, dim, heads = read_kinds(config), config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.size("head_dim", config.size("attention_head_dim", 128))
    eps = config.number("layer_norm_epsilon", 1e-5)
    spec = ModelSpec(
        arch="nemotronh",
        layers=len(kinds),
        dim=dim,
        hidden=config.size("intermediate_size"),
        vocab=config.size("vocab_size"),
        max_len=config.size("max_position_embeddings"),
        eps=eps,
        attn=AttentionSpec(heads, config.size("num_key_value_heads", heads), head_dim, NO_ROPE),
        act="relu2",
        biases=read_biases(config, EXPERTS in kinds),
    )
    if EXPERTS in kinds:
        spec = read_experts(config, spec)
    else:
        config.ignore(*EXPERT_FIELDS)
    return of_kinds(spec, read_mamba(config, eps), kinds)


def read_kinds(config: ConfigReader) -> list[str]:
    if "layers_block_type" in config:
        found = config.strings("layers_block_type")
        if not KINDS.keys() >= set(found):
            raise config.unsupported("layers_block_type", found, KINDS)
        kinds = [KINDS[kind] for kind in found]
        config.ignore("hybrid_override_pattern")
    else:
        kinds = list(config.text("hybrid_override_pattern"))
        if not set(KINDS.values()).issuperset(kinds):
            raise config.unsupported("hybrid_override_pattern", "".join(kinds), ("M, *, - and E",))
    config.require("num_hidden_layers", (len(kinds),), len(kinds))
    return kinds


def read_biases(config: ConfigReader, experts: bool) -> frozenset[str]:
    if experts:
        config.require("mlp_bias", (False,), False)
    conv = ("conv",) if config.flag("use_conv_bias", True) else ()
    return frozenset((*conv, *(("up", "down") if config.flag("mlp_bias", False) else ())))


def read_mamba(config: ConfigReader, eps: float) -> Mamba2Spec:
    """Reads Mamba2's sizes; its groups are normed separately."""
    groups, (least, most) = config.size("n_groups", 8), bounds(config, "time_step_limit")
    return Mamba2Spec(
        heads=config.size("mamba_num_heads"),
        head_dim=config.size("mamba_head_dim"),
        state_dim=config.size("ssm_state_size"),
        groups=groups,
        conv_width=config.size("conv_kernel", 4),
        eps=eps,
        norm_groups=groups,
        dt_min=least,
        dt_max=most,
    )


def read_experts(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    config.require("n_shared_experts", (1,), 1)
    experts = ExpertSpec(
        count=config.size("n_routed_experts", most=MAX_EXPERTS),
        top_k=config.size("num_experts_per_tok", most=MAX_EXPERTS),
        hidden=config.size("moe_intermediate_size"),
        act=spec.act,
        scoring="sigmoid",
        renormalize=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        choice_bias=True,
        groups=config.size("n_group", 1),
        top_k_groups=config.size("topk_group", 1),
        gated=False,
        width=config.size("moe_latent_size") if "moe_latent_size" in config else 0,
    )
    return replace(spec, experts=experts, shared_hidden=config.size("moe_shared_expert_intermediate_size"))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    unused = config.count("nextn_predict_layers", 0, most=MAX_LAYERS)
    layers = config.size("block_count", most=MAX_LAYERS) - unused
    hidden, kv_heads = config.array(HIDDEN, COUNTS)[:layers], config.array(gguf_config.KV_HEADS, COUNTS)[:layers]
    for key, values in ((HIDDEN, hidden), (gguf_config.KV_HEADS, kv_heads)):
        if len(values) != layers or len({*values} - {0}) > 1:
            raise config.unsupported(key, list(values), (f"0 or the same number for {layers} layers",))
    counted = "expert_count" in config
    other = EXPERTS if counted and config.count("expert_count", 0) else MLP
    kinds = [ATTENTION if kv else other if ff else MAMBA for ff, kv in zip(hidden, kv_heads, strict=True)]
    scalar = config.having(**{HIDDEN: max(hidden), gguf_config.KV_HEADS: max(kv_heads)})
    spec = gguf_config.read_decoder(
        scalar.without("rope.dimension_count"), tensors, "nemotronh", interleaved=False, keys=KEYS, experts=True
    )
    config.number(gguf_config.LAYER_EPS, 1e-5)  # only for omitted layers
    config.size("rope.dimension_count", 2)  # nothing is rotated
    config.flag("rope.scaling.finetuned", False)
    attn = replace(spec.attn, rope=NO_ROPE)
    spec = replace(spec, layers=layers, unused_layers=unused, attn=attn, act="relu2")
    if other == EXPERTS:
        spec = read_gguf_experts(config, spec)
    return of_kinds(spec, mamba2_mixer.read_gguf(config, spec.eps), kinds)


def read_gguf_experts(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """Reads the experts from GGUF metadata; llama.cpp always scores them by sigmoids."""
    config.require(SHARED_COUNT, (1,), 1)
    experts = gguf_config.read_experts(config, spec, scoring=2, renormalize=False)
    width = config.size(LATENT) if LATENT in config else 0
    experts = replace(experts, choice_bias=True, gated=False, width=width)
    return replace(spec, experts=experts, shared_hidden=config.size(SHARED_SIZE))
