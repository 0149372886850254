"""The Llama family: Llama 2 and 3, SmolLM2, Falcon3, Mistral, Ministral and whatever else is shaped like them. Its GGUF
files may have experts: those are Mixtral's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf import config as gguf_config
from penstock.model.ops import Ops, V, Weight
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor
from penstock.model.weights import Packer

HUGGING_FACE = names.HUGGING_FACE
GGUF = names.GGUF
MISTRAL_WINDOW = 4096  # when the config is silent; null says that there is none


def read_hf(config: ConfigReader) -> ModelSpec:
    config.require("rope_interleaved", (False,), False)
    spec = replace(config_hf.read_decoder(config, "llama"), biases=config_hf.read_biases(config))
    if config.strings("architectures") == ["LlamaForCausalLM"]:
        return spec
    window = config_hf.read_window(config, MISTRAL_WINDOW)
    return spec.with_windows(config_hf.read_sliding(config, [window > 0] * spec.layers), window)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(
        config, tensors, "llama", interleaved=True, keys=(gguf_config.WINDOW,), experts=True
    )
    if config.count("expert_count", 0):
        spec = replace(spec, arch="mixtral", experts=gguf_config.read_experts(config, spec))
    return spec.with_windows([True] * spec.layers, gguf_config.read_window(config))


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Weight
    attention: decoder.Part
    mlp_norm: Weight
    mlp: decoder.Mlp | decoder.Mixture


@dataclass(frozen=True, slots=True)
class Llama:
    """Every part takes a norm of what all parts before it added up to."""

    spec: ModelSpec
    layers: tuple[Layer, ...]
    ends: decoder.Ends

    def forward(self, ops: Ops[V]) -> V:
        eps = self.spec.eps
        x, residual = self.ends.enter(ops), None
        for layer in self.layers:
            x, residual = ops.add_norm(x, residual, layer.attn_norm, eps)
            x = layer.attention(ops, x)
            x, residual = ops.add_norm(x, residual, layer.mlp_norm, eps)
            x = layer.mlp(ops, x)
        return self.ends.leave(ops, x, residual)


def build(
    spec: ModelSpec, pack: Packer, attention: Callable[[ModelSpec, Packer, int], decoder.Part] = decoder.attention
) -> Llama:
    layers = tuple(
        Layer(
            attn_norm=decoder.norm(spec, pack, i, "attn_norm"),
            attention=attention(spec, pack, i),
            mlp_norm=decoder.norm(spec, pack, i, "mlp_norm"),
            mlp=decoder.mlp_or_experts(spec, pack, i),
        )
        for i in range(spec.layers)
    )
    return Llama(spec, layers, decoder.ends(spec, pack))
