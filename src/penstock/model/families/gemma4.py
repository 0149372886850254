"""Reads the text part of Gemma 4: Gemma 3 with value norms, larger heads and fewer KV heads in full-attention layers,
and a factor per layer. Smaller models have per-layer embeddings and last layers that reuse the keys and values of
earlier ones, as Gemma 3n; 26B-A4B has experts parallel to each MLP.

Full-attention layers rotate only some of a head's pairs, each of which spans half of the head. Where one matrix
projects both keys and values, it is packed twice.

A KV block has room for layers of the larger size. Several smaller layers share such a room where they fit: the
published sizes waste nothing. Images and audio are refused, and their towers are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model import config_hf, decoder, names, per_layer, rope
from penstock.model.config_reader import MAX_LAYERS, ConfigReader, number_or_null, sizes_in_each
from penstock.model.decoder import Attention, Ends, Mlp, Norm
from penstock.model.families import gemma2, gemma3, gemma3n
from penstock.model.gguf import config as gguf_config
from penstock.model.ops import ExpertWeights, Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.per_layer import PerLayerGate, PerLayerInputs
from penstock.model.spec import AttentionSpec, ExpertSpec, ModelSpec, PerLayerSpec, RopeSpec, all_but_each
from penstock.model.tensor import Tensor

PERIOD, THETA, GLOBAL_HEAD_DIM, GLOBAL_ROTATED = 6, 1000000.0, 512, 0.25
_TEXT = gemma2.HUGGING_FACE.but(
    **gemma3n.NORMS,
    **gemma3n.PER_LAYER,
    **{
        "router": "router.proj",
        "router_scale": "router.scale",
        "expert_scale": "router.per_expert_scale",
        "experts.gate_up": "experts.gate_up_proj",
        "experts.down": "experts.down_proj",
        "experts_norm": "pre_feedforward_layernorm_2",
        "after_dense_norm": "post_feedforward_layernorm_1",
        "after_experts_norm": "post_feedforward_layernorm_2",
        "layer_scale": "layer_scalar",
    },
)
HUGGING_FACE = names.beside_vision(_TEXT._replace(top={**_TEXT.top, **gemma3n.PER_LAYER_TOP}))
_GGUF = gemma3.GGUF.but(
    **gemma3n.GGUF_PER_LAYER,
    router_scale="ffn_gate_inp.scale",
    expert_scale="ffn_down_exps.scale",
    experts_norm="pre_ffw_norm_2",
    after_dense_norm="post_ffw_norm_1",
    after_experts_norm="post_ffw_norm_2",
    layer_scale="layer_output_scale",
)
GGUF = _GGUF._replace(top={**_GGUF.top, **gemma3n.GGUF_PER_LAYER_TOP})
KEY_LENGTH, ROTATED = "attention.key_length_swa", "rope.dimension_count_swa"
KEYS = (
    *(gguf_config.WINDOW, gguf_config.PATTERN, "rope.freq_base_swa", gemma2.LOGITS, gemma3n.SHARED, gemma3n.WIDTH),
    *(KEY_LENGTH, "attention.value_length_swa", ROTATED),
)


# ---- model ----


@dataclass(frozen=True, slots=True)
class ExpertsBeside:
    """Computes experts parallel to the MLP; router and experts read the residual stream before it."""

    spec: ExpertSpec
    router_norm: Norm  # its gain includes the division by the root of the width
    router: Weight
    norm: Norm
    experts: ExpertWeights
    after_dense_norm: Norm
    after_norm: Norm

    def __call__(self, ops: Ops[V], residual: V, dense: V) -> V:
        """Maps the residual stream and the MLP's output to the sum of both, each normed."""
        routed, _ = self.router_norm(ops, residual)
        logits = ops.linear(routed, self.router, precision="float32")
        normed, _ = self.norm(ops, residual)
        chosen, _ = self.after_norm(ops, ops.moe(normed, logits, self.experts, self.spec))
        beside, _ = self.after_dense_norm(ops, dense)
        return ops.add(chosen, beside)


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    """Computes attention, MLP, and the optional experts and per-layer input."""

    attn_norm: Norm
    attention: Attention
    after_attn_norm: Norm
    mlp_norm: Norm
    mlp: Mlp
    experts: ExpertsBeside | None
    after_mlp_norm: Norm
    per_layer: PerLayerGate | None
    scale: float

    def __call__(self, ops: Ops[V], x: V, inputs: V | None) -> V:
        """Maps the residual stream [T, dim] and the inputs of all layers to the residual stream."""
        normed, _ = self.attn_norm(ops, x)
        attended, _ = self.after_attn_norm(ops, self.attention(ops, normed))
        h, residual = self.mlp_norm(ops, attended, x)
        y = self.mlp(ops, h)
        if self.experts:
            y = self.experts(ops, residual, y)
        y, _ = self.after_mlp_norm(ops, y)
        x = ops.add(y, residual)
        if self.per_layer and inputs is not None:
            x = ops.add(self.per_layer(ops, x, inputs), x)
        return decoder.scaled(ops, x, self.scale)


@dataclass(frozen=True, slots=True)
class GemmaDecoder:
    """Computes logits with layers that may have per-layer inputs."""

    ends: Ends
    inputs: PerLayerInputs | None
    layers: tuple[GemmaLayer, ...]

    def forward(self, ops: Ops[V]) -> V:
        x: V = self.ends.enter(ops)
        inputs = self.inputs(ops, x) if self.inputs else None
        for layer in self.layers:
            x = layer(ops, x, inputs)
        return self.ends.leave(ops, x, None)


def build(spec: ModelSpec, pack: Packer) -> GemmaDecoder:
    embed = pack.matrix(("embed", spec.vocab), width=spec.dim)
    head = embed if spec.tied else pack.matrix(("head", spec.vocab), width=spec.dim)
    return GemmaDecoder(
        ends=Ends(spec, embed, None, decoder.rms_norm(spec, pack, "norm"), head),
        inputs=per_layer.build_inputs(spec, pack) if spec.per_layer else None,
        layers=tuple(build_layer(spec, pack, layer) for layer in range(spec.layers)),
    )


def build_layer(spec: ModelSpec, pack: Packer, layer: int) -> GemmaLayer:
    name = f"layers.{layer}"

    def norm(part: str) -> Norm:
        return decoder.rms_norm(spec, pack, f"{name}.{part}")

    return GemmaLayer(
        attn_norm=norm("attn_norm"),
        attention=decoder.attention(spec, pack, layer),
        after_attn_norm=norm("after_attn_norm"),
        mlp_norm=norm("mlp_norm"),
        mlp=decoder.mlp(spec, pack, name, spec.mlp_hidden(layer)),
        experts=build_experts(spec, pack, name) if spec.experts else None,
        after_mlp_norm=norm("after_mlp_norm"),
        per_layer=per_layer.build_gate(spec, pack, layer) if spec.per_layer else None,
        scale=pack.number(f"{name}.layer_scale") if pack.has("layers.0.layer_scale") else 1.0,  # all layers or none
    )


def build_experts(spec: ModelSpec, pack: Packer, name: str) -> ExpertsBeside:
    assert spec.experts
    gain = pack.computed(f"{name}.router_scale", spec.dim, lambda scale: scale * np.float32(spec.dim**-0.5))
    scale = pack.vector(f"{name}.expert_scale", spec.experts.count)
    return ExpertsBeside(
        spec=spec.experts,
        router_norm=Norm(gain, spec.eps),
        router=pack.matrix((f"{name}.router", spec.experts.count), width=spec.dim),
        norm=decoder.rms_norm(spec, pack, f"{name}.experts_norm"),
        experts=pack.experts(name, spec.experts, spec.dim)._replace(scale=scale),
        after_dense_norm=decoder.rms_norm(spec, pack, f"{name}.after_dense_norm"),
        after_norm=decoder.rms_norm(spec, pack, f"{name}.after_experts_norm"),
    )


# ---- configs ----


def read_hf(config: ConfigReader) -> ModelSpec:
    if "text_config" in config:
        config.ignore(*gemma3n.OTHER_TOWERS)
        return config_hf.read_text_part(config, read_text)
    return read_text(config)


def read_text(config: ConfigReader) -> ModelSpec:
    unscaled = config.table("rope_scaling")
    unscaled.refuse_others(())
    spec = config_hf.read_decoder(
        config, "gemma4", tied=True, act_key="hidden_activation", hidden_key="hidden_size", scaling=unscaled
    )
    for key in ("head_dim", "num_key_value_heads"):
        config.size(key)  # required: the default differs from other families
    config.require("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    config.require("use_bidirectional_attention", ("vision",), "vision")  # null, or only within an image
    hidden, shared = config.size("intermediate_size"), config.count("num_kv_shared_layers", 0, most=spec.layers)
    wide = shared if config.flag("use_double_wide_mlp", False) else 0
    spec = replace(
        gemma3n.with_hidden(gemma2.scaled(spec), [hidden] * (spec.layers - wide) + [2 * hidden] * wide),
        logit_cap=number_or_null(config, gemma2.LOGITS, 0.0),
        biases=config_hf.read_biases(config),
        per_layer=read_per_layer(config),
    )
    if config.flag("enable_moe_block", False):
        spec = replace(spec, experts=read_experts(config, spec))
    else:
        config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    sliding = [*config_hf.read_sliding(config, all_but_each(PERIOD, spec.layers))]
    sliding[-1] = False  # regardless of the config
    near, far = read_attention(config, spec, sliding)
    return gemma3n.with_shared_kv(spec.with_attention([near if one else far for one in sliding]), shared)


def read_per_layer(config: ConfigReader) -> PerLayerSpec | None:
    vocab = config.count("vocab_size_per_layer_input", 262144)
    width = 0 if config.says_null("hidden_size_per_layer_input") else config.count("hidden_size_per_layer_input", 256)
    return PerLayerSpec(width, vocab) if width else None


def read_experts(config: ConfigReader, spec: ModelSpec) -> ExpertSpec:
    experts = config_hf.read_experts(
        config, spec, count="num_experts", hidden="moe_intermediate_size", top_k="top_k_experts"
    )
    return replace(experts, renormalize=True)


def read_attention(
    config: ConfigReader, spec: ModelSpec, sliding: Sequence[bool]
) -> tuple[AttentionSpec, AttentionSpec]:
    ropes = config.table("rope_parameters")
    ropes.refuse_others((config_hf.FULL, config_hf.SLIDING))
    same = config.flag("attention_k_eq_v", False)
    plain = replace(spec.attn, qk_norm="head", multiplier=1.0, v_norm=True)
    near = replace(plain, window=config.size("sliding_window", 512), rope=read_near(ropes, plain.head_dim))
    head_dim, kv_heads = read_far_sizes(config, sliding, plain.kv_heads if same else 0)
    far = replace(
        plain,
        head_dim=head_dim,
        kv_heads=kv_heads or plain.kv_heads,
        rope=read_far(ropes.table(config_hf.FULL), head_dim),
        v_is_k=same,
    )
    return near, far


def read_far_sizes(config: ConfigReader, sliding: Sequence[bool], kv_heads: int) -> tuple[int, int]:
    sizes = config.size("global_head_dim", GLOBAL_HEAD_DIM, most=rope.MAX_DIMS), kv_heads
    if "num_global_key_value_heads" in config:
        count = config.size("num_global_key_value_heads")
        sizes = sizes[0], count if kv_heads else 0
    if "per_layer_config" not in config:
        return sizes
    each = config.table("per_layer_config")
    found = set()
    for layer in each.names():
        one = each.table(layer)
        one.refuse_others(("head_dim", "num_key_value_heads"))
        found.add((one.size("head_dim", sizes[0], most=rope.MAX_DIMS), one.size("num_key_value_heads", MAX_HEADS)))
    full = {str(layer) for layer, one in enumerate(sliding) if not one}
    if set(each.names()) != full or len(found) != 1:
        raise UnsupportedModel(
            "per_layer_config in config.json is not supported unless all layers of type full_attention, and no other "
            "ones, have the same sizes"
        )
    head_dim, count = found.pop()
    return head_dim, kv_heads if count == MAX_HEADS else count


MAX_HEADS = 1 << 16  # a default above any real value


def read_near(ropes: ConfigReader, head_dim: int) -> RopeSpec:
    near = ropes.table(config_hf.SLIDING)
    near.refuse_others(("rope_theta", "rope_type", "partial_rotary_factor"))
    near.require("rope_type", ("default",), "default")
    near.require("partial_rotary_factor", (1,), 1)
    base = near.number("rope_theta", gemma3.LOCAL_THETA, least=1.001)
    return RopeSpec(rope.plain(base, head_dim), interleaved=False)


def read_far(far: ConfigReader, head_dim: int) -> RopeSpec:
    """Reads the RoPE of full-attention layers; unrotated pairs have frequency 0."""
    far.refuse_others(("rope_theta", "rope_type", "partial_rotary_factor", "factor"))
    far.require("rope_type", ("proportional",), "proportional")
    share = far.number("partial_rotary_factor", 1.0 if far.names() else GLOBAL_ROTATED)
    freqs = rope.linear(rope.plain(far.number("rope_theta", THETA, least=1.001), head_dim), far.number("factor", 1.0))
    rotated = int(share * head_dim // 2)
    return RopeSpec(tuple(freq if i < rotated else 0.0 for i, freq in enumerate(freqs)), interleaved=False)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    if "rope_freqs.weight" not in tensors:
        raise MalformedFile("the file has no tensor 'rope_freqs.weight', which says what part of a head is rotated")
    layers = config.size("block_count", most=MAX_LAYERS)
    sliding = gguf_config.read_sliding(config, layers, PERIOD)
    kv_heads = sizes_in_each(config, "attention.head_count_kv", layers)
    few = config.having(**{"attention.head_count_kv": kv_heads[-1]})
    spec = gguf_config.read_decoder(
        few, tensors, "gemma4", interleaved=False, keys=KEYS, hidden_key="embedding_length", experts=True
    )
    experts = "expert_count" in config
    width = config.count(gemma3n.WIDTH, 0)
    spec = replace(
        gemma3n.with_hidden(gemma2.scaled(spec), sizes_in_each(config, "feed_forward_length", layers)),
        logit_cap=number_or_null(config, gemma2.LOGITS, 0.0),
        per_layer=PerLayerSpec(width, gemma3n.rows_of(tensors, "per_layer_token_embd")) if width else None,
    )
    if experts:
        spec = replace(spec, experts=gguf_config.read_experts(config, spec))
    head_dim = config.size(KEY_LENGTH, spec.attn.head_dim, most=rope.MAX_DIMS)
    for key in ("attention.value_length_swa", ROTATED):
        config.require(key, (head_dim,), head_dim)
    base = config.number("rope.freq_base_swa", gemma3.LOCAL_THETA, least=1.001)
    full = [layer for layer in range(layers) if not sliding[layer]]
    far = replace(
        spec.attn,
        qk_norm="head",
        multiplier=1.0,
        v_norm=True,
        v_is_k=bool(full) and not any(f"blk.{layer}.attn_v.weight" in tensors for layer in full),
    )
    near = replace(
        far,
        head_dim=head_dim,
        kv_heads=next((kv_heads[layer] for layer in range(layers) if sliding[layer]), far.kv_heads),
        window=config.size(gguf_config.WINDOW),
        rope=RopeSpec(rope.plain(base, head_dim), interleaved=False),
        v_is_k=False,
    )
    spec = spec.with_attention([near if one else far for one in sliding])
    return gemma3n.with_shared_kv(spec, config.count(gemma3n.SHARED, 0))
