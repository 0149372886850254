"""Reads and builds Kimi-Linear: most layers have Kimi delta attention (KDA), a delta net with per-channel decay; every
few layers have MLA without RoPE. The first layers have a plain MLP, the others experts with a shared one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from penstock.errors import MalformedFile
from penstock.model import decoder, names, rope
from penstock.model.config_reader import COUNTS, MAX_EXPERTS, MAX_LAYERS, ConfigReader
from penstock.model.families import deepseek2, hybrid, mla
from penstock.model.gguf import config as gguf_config
from penstock.model.ops import DeltaInputs, DeltaWeights, Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.recurrence import DeltaSpec
from penstock.model.spec import AttentionSpec, ExpertSpec, MlaSpec, ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

PUBLISHED = names.HUGGING_FACE.but(
    **{ours: theirs.replace("mlp.", "block_sparse_moe.", 1) for ours, theirs in names.EXPERTS.items()},
    q_a="self_attn.q_a_proj", q_norm="self_attn.q_a_layernorm", q_b="self_attn.q_b_proj",
    kv_a="self_attn.kv_a_proj_with_mqa", kv_norm="self_attn.kv_a_layernorm", kv_b="self_attn.kv_b_proj",
    conv_q="self_attn.q_conv1d", conv_k="self_attn.k_conv1d", conv_v="self_attn.v_conv1d",
    delta_b="self_attn.b_proj", delta_a_in="self_attn.f_a_proj", delta_a_out="self_attn.f_b_proj",
    delta_z_in="self_attn.g_a_proj", delta_z_out="self_attn.g_b_proj",
    decay_log="self_attn.A_log", dt="self_attn.dt_bias", delta_norm="self_attn.o_norm",
).but(**{f"experts.*.{ours}": f"block_sparse_moe.experts.*.{theirs}" for ours, theirs in
         (("gate", "w1"), ("up", "w3"), ("down", "w2"))})  # fmt: skip
# Transformers saves the plain MLP of the first layers under an expert's names.
SAVED = {f"block_sparse_moe.{part}_proj": part for part in ("gate", "up", "down")}
HUGGING_FACE = PUBLISHED._replace(parts={**PUBLISHED.parts, **SAVED})
GGUF = deepseek2.GGUF.but(
    conv_q="ssm_conv1d_q", conv_k="ssm_conv1d_k", conv_v="ssm_conv1d_v",
    delta_b="ssm_beta", delta_a_in="ssm_f_a", delta_a_out="ssm_f_b", delta_z_in="ssm_g_a", delta_z_out="ssm_g_b",
    decay="ssm_a", dt="ssm_dt.bias", delta_norm="ssm_norm",
)  # fmt: skip
ALIASES = {  # transformers' names for some fields
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
UNUSED = ("head_dim", "qk_head_dim", "rope_theta", "rope_scaling", "rope_parameters")  # nothing is rotated
CONV, HEAD_DIM, KV_HEADS = "ssm.conv_kernel", "kda.head_dim", "attention.head_count_kv"
KEYS = (*deepseek2.KEYS, CONV, HEAD_DIM)


@dataclass(frozen=True, slots=True)
class LowRankProjection:
    """Computes a projection through a narrow intermediate."""

    narrow: Weight
    wide: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        return ops.linear(ops.linear(x, self.narrow), self.wide)


@dataclass(frozen=True, slots=True)
class KimiDeltaAttention:
    """Computes a delta net with per-channel decay, and its projections."""

    layer: int  # index among layers with a state
    spec: DeltaSpec
    eps: float
    qkv: Weight
    beta: Weight
    alpha: LowRankProjection
    z: LowRankProjection
    weights: DeltaWeights
    o: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        inputs = DeltaInputs(ops.linear(x, self.qkv), self.z(ops, x), ops.linear(x, self.beta), self.alpha(ops, x))
        return ops.linear(ops.delta_net(self.layer, inputs, self.weights, self.spec, self.eps), self.o)


def mixer(spec: ModelSpec, pack: Packer, layer: int) -> decoder.Part:
    return delta_attention(spec, pack, layer) if layer in spec.recurrent else mla.attention(spec, pack, layer)


def delta_attention(spec: ModelSpec, pack: Packer, layer: int) -> KimiDeltaAttention:
    d, name = spec.recurrence, f"layers.{layer}"
    assert isinstance(d, DeltaSpec)
    widths = {"q": d.k_width, "k": d.k_width, "v": d.v_width}

    def low_rank(part: str, width: int) -> LowRankProjection:
        narrow = pack.matrix((f"{name}.{part}_in", d.v_dim), width=spec.dim)
        return LowRankProjection(narrow, pack.matrix((f"{name}.{part}_out", width), width=d.v_dim))

    return KimiDeltaAttention(
        layer=spec.state_layer(layer),
        spec=d,
        eps=spec.eps,
        qkv=pack.matrix(*((f"{name}.{part}", width) for part, width in widths.items()), width=spec.dim),
        beta=pack.matrix((f"{name}.delta_b", d.v_heads), width=spec.dim),
        alpha=low_rank("delta_a", d.decay_width),
        z=low_rank("delta_z", d.v_width),
        weights=DeltaWeights(
            conv=pack.joined(*((f"{name}.conv_{part}", width * d.conv_width) for part, width in widths.items())),
            decay=hybrid.decay(d, pack, name),
            dt_bias=pack.vector(f"{name}.dt", d.decay_width),
            gain=pack.vector(f"{name}.delta_norm", d.v_dim),
        ),
        o=pack.matrix((f"{name}.o", spec.dim), width=d.v_width),
    )


build = partial(decoder.build, mixer=mixer)


# ---- configs ----


def read_hf(config: ConfigReader) -> ModelSpec:
    config.require("attention_bias", (False,), False)
    config.require("hidden_act", ("silu",), "silu")
    config.require("mla_use_nope", (True,), True)
    config.ignore(*UNUSED)
    dims, rank = config.size("qk_rope_head_dim", most=rope.MAX_DIMS), config.size("kv_lora_rank", most=rope.MAX_DIMS)
    heads = MlaSpec(
        qk_nope_head_dim=config.size("qk_nope_head_dim"),
        v_head_dim=config.size("v_head_dim"),
        q_lora_rank=config.size("q_lora_rank") if "q_lora_rank" in config else 0,
    )
    layers = config.size("num_hidden_layers", most=MAX_LAYERS)
    experts = read_experts(config)
    spec = ModelSpec(
        arch="kimi_linear",
        layers=layers,
        dim=config.size("hidden_size"),
        hidden=config.size("intermediate_size"),
        vocab=config.size("vocab_size"),
        max_len=config.size(said(config, "model_max_length")),
        eps=config.number("rms_norm_eps", 1e-5),
        attn=attention_of(config.size("num_attention_heads"), heads, dims, rank),
        tied=config.flag("tie_word_embeddings", False),
        biases=frozenset(),
        mla=heads,
        experts=experts,
        dense=deepseek2.read_dense(config, layers, 1),
        shared_hidden=config.size(said(config, "num_shared_experts"), 1) * experts.hidden,
        unused_layers=config.count("num_nextn_predict_layers", 0, most=MAX_LAYERS),
    )
    config.require("num_key_value_heads", (spec.attn.heads,), spec.attn.heads)
    return read_delta(config, spec)


def said(config: ConfigReader, key: str) -> str:
    return ALIASES[key] if key not in config and ALIASES[key] in config else key


def read_experts(config: ConfigReader) -> ExpertSpec:
    config.require("moe_layer_freq", (1,), 1)
    config.require("moe_router_activation_func", ("sigmoid",), "sigmoid")
    groups, best = config.size(said(config, "num_expert_group"), 1, most=MAX_EXPERTS), config.size("topk_group", 1)
    if not config.flag("use_grouped_topk", True):
        groups = best = 1
    return ExpertSpec(
        count=config.size(said(config, "num_experts"), most=MAX_EXPERTS),
        top_k=config.size(said(config, "num_experts_per_token"), most=MAX_EXPERTS),
        hidden=config.size("moe_intermediate_size"),
        scoring="sigmoid",
        renormalize=config.flag(said(config, "moe_renormalize"), True),
        scale=config.number("routed_scaling_factor", 1.0),
        choice_bias=True,
        groups=groups,
        top_k_groups=best,
    )


def read_delta(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """Reads the delta nets. Published configs have a table for them; transformers' do not."""
    table = config.table("linear_attn_config")
    heads = table.size("num_heads", config.size("linear_num_heads", 32))
    dim = table.size("head_dim", config.size("linear_head_dim", 128))
    conv = table.size("short_conv_kernel_size", config.size("linear_conv_kernel_dim", 4))
    recurrent = read_recurrent(config, table, spec.layers)
    table.note_unread((), {})
    return with_delta(spec, heads, dim, conv, recurrent)


def read_recurrent(config: ConfigReader, table: ConfigReader, layers: int) -> list[bool]:
    full, linear = table.array("full_attn_layers", COUNTS), table.array("kda_layers", COUNTS)  # counted from 1
    if "layer_types" in config:
        kinds = config.strings("layer_types")
        if len(kinds) != layers or not {hybrid.LINEAR, hybrid.FULL}.issuperset(kinds):
            raise config.unsupported("layer_types", kinds, (f"{hybrid.LINEAR} or {hybrid.FULL} for each layer",))
        return [kind == hybrid.LINEAR for kind in kinds]
    if sorted((*full, *linear)) != list(range(1, layers + 1)):
        raise MalformedFile(
            f"full_attn_layers and kda_layers of linear_attn_config in config.json must name each of {layers} layers "
            f"once, counted from 1; got {list(full)} and {list(linear)}"
        )
    return [layer + 1 in linear for layer in range(layers)]


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    rank = config.size("attention.kv_lora_rank", most=rope.MAX_DIMS)
    dims = config.size("rope.dimension_count", most=rope.MAX_DIMS)
    config.require(deepseek2.KEY, (rank + dims,))
    config.size(deepseek2.VALUE, rank)  # redundant; MLA's value size is used
    config.refuse_others(gguf_config.KEYS.union(gguf_config.EXPERTS, KEYS, (gguf_config.RMS_EPS,)))
    plain = config.without(deepseek2.KEY, deepseek2.VALUE, KV_HEADS, "rope.dimension_count")
    spec = gguf_config.read_decoder(plain, tensors, "kimi_linear", interleaved=False, experts=True, keys=KEYS)
    config.require("vocab_size", (spec.vocab,), spec.vocab)
    heads = MlaSpec(
        qk_nope_head_dim=config.size(f"{deepseek2.KEY}_mla", most=rope.MAX_DIMS) - dims,
        v_head_dim=config.size(f"{deepseek2.VALUE}_mla"),
        q_lora_rank=config.size("attention.q_lora_rank") if "attention.q_lora_rank" in config else 0,
    )
    experts = replace(gguf_config.read_experts(config, spec, scoring=2), choice_bias=True)
    kv_heads = config.array(KV_HEADS, COUNTS)  # 0 marks a delta net
    if len(kv_heads) != spec.layers:
        raise config.unsupported(KV_HEADS, list(kv_heads), (f"a number for each of {spec.layers} layers",))
    spec = replace(
        spec,
        attn=attention_of(spec.attn.heads, heads, dims, rank),
        mla=heads,
        experts=experts,
        dense=frozenset(range(min(config.count("leading_dense_block_count", 0), spec.layers))),
        shared_hidden=config.size("expert_shared_count") * experts.hidden,
    )
    recurrent = [count == 0 for count in kv_heads]
    return with_delta(spec, spec.attn.heads, config.size(HEAD_DIM), config.size(CONV), recurrent)


def attention_of(heads: int, mla: MlaSpec, dims: int, rank: int) -> AttentionSpec:
    """Returns MLA with `dims` unrotated dimensions in addition to the latents."""
    scale = (mla.qk_nope_head_dim + dims) ** -0.5
    return AttentionSpec(heads, 1, dims + rank, RopeSpec((), interleaved=False), multiplier=scale, v_dim=rank)


def with_delta(spec: ModelSpec, heads: int, dim: int, conv: int, recurrent: list[bool]) -> ModelSpec:
    delta = DeltaSpec(heads, heads, dim, dim, conv, channel_decay=True, gate="sigmoid")
    return replace(spec, recurrence=delta, recurrent=frozenset(i for i, one in enumerate(recurrent) if one))
