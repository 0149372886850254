"""OLMo2: norms after attention and MLP instead of before them, and of all queries and keys at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf import config as gguf_config
from penstock.model.ops import Ops, V, Weight
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor
from penstock.model.weights import Packer

HUGGING_FACE = names.HUGGING_FACE.but(
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    after_attn_norm="post_attention_layernorm",
    after_mlp_norm="post_feedforward_layernorm",
)
GGUF = names.GGUF.but(
    q_norm="attn_q_norm", k_norm="attn_k_norm", after_attn_norm="post_attention_norm", after_mlp_norm="post_ffw_norm"
)


def read_hf(config: ConfigReader) -> ModelSpec:
    config.number("rms_norm_eps")  # silence would mean another than elsewhere
    return normed(replace(config_hf.read_decoder(config, "olmo2"), biases=config_hf.read_biases(config)))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    return normed(gguf_config.read_decoder(config, tensors, "olmo2", interleaved=False))


def normed(spec: ModelSpec) -> ModelSpec:
    return replace(spec, attn=replace(spec.attn, qk_norm="all"))


@dataclass(frozen=True, slots=True)
class Layer:
    attention: decoder.Attention
    after_attn_norm: Weight
    mlp: decoder.Mlp
    after_mlp_norm: Weight


@dataclass(frozen=True, slots=True)
class Olmo2:
    """Every part takes what all parts before it added up to, and a norm of what it makes of that is added."""

    spec: ModelSpec
    layers: tuple[Layer, ...]
    ends: decoder.Ends

    def forward(self, ops: Ops[V]) -> V:
        eps = self.spec.eps
        x = self.ends.enter(ops)
        for layer in self.layers:
            added, _ = ops.add_norm(layer.attention(ops, x), None, layer.after_attn_norm, eps)
            x = ops.add(added, x)
            added, _ = ops.add_norm(layer.mlp(ops, x), None, layer.after_mlp_norm, eps)
            x = ops.add(added, x)
        return self.ends.leave(ops, x, None)


def build(spec: ModelSpec, pack: Packer) -> Olmo2:
    layers = tuple(
        Layer(
            attention=decoder.attention(spec, pack, i),
            after_attn_norm=decoder.norm(spec, pack, i, "after_attn_norm"),
            mlp=decoder.mlp(spec, pack, i),
            after_mlp_norm=decoder.norm(spec, pack, i, "after_mlp_norm"),
        )
        for i in range(spec.layers)
    )
    return Olmo2(spec, layers, decoder.ends(spec, pack))
