"""Reads and builds ModernBERT: RoPE, bias-free norms before attention and MLP, gated MLPs, and two-sided windows in all
layers except every third.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.errors import UnsupportedModel
from penstock.model import config_hf, decoder, names, rope
from penstock.model.config_reader import MAX_LAYERS, ConfigReader
from penstock.model.families import bert
from penstock.model.ops import Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.spec import ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

PARTS = {
    "attn_norm": "attn_norm", "attn.Wqkv": "qkv", "attn.Wo": "o",
    "mlp_norm": "mlp_norm", "mlp.Wi": "gate_up", "mlp.Wo": "down",
}  # fmt: skip
HUGGING_FACE = names.Naming(
    top={
        f"{model}{theirs}": ours
        for model in ("", "model.")
        for theirs, ours in {
            "embeddings.tok_embeddings": "embed",
            "embeddings.norm": "embed_norm",
            "final_norm": "norm",
        }.items()
    },
    layer=re.compile(rf"(?:model\.)?layers\.{names.NUMBER}\.(.+)"),
    parts=PARTS,
    ignored=re.compile(r"(head|decoder|classifier)\..+"),  # training only
)
GGUF = names.GGUF._replace(top={"token_embd": "embed", "token_embd_norm": "embed_norm", "output_norm": "norm"}).but(
    qkv="attn_qkv", gate_up="ffn_up"
)
NOT_COMPUTED = (  # training options, and those of its flash attention and masked language model
    *("classifier_activation", "classifier_bias", "classifier_dropout", "classifier_pooling", "cls_token_id"),
    *(
        "compile",
        "decoder_bias",
        "deterministic_flash_attn",
        "embedding_dropout",
        "id2label",
        "initializer_cutoff_factor",
    ),
    *("label2id", "mlp_dropout", "reference_compile", "repad_logits_with_grad", "sep_token_id"),
    *("sparse_pred_ignore_index", "sparse_prediction", "tie_word_embeddings"),
)
FAR, NEAR = 160000.0, 10000.0  # RoPE bases of full-attention and of windowed layers
PERIOD, LOCAL = 3, 128
KEYS = {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base", "rope.freq_base_swa"}


def read_hf(config: ConfigReader) -> ModelSpec:
    config.ignore(*NOT_COMPUTED)
    for key in ("attention_bias", "mlp_bias", "norm_bias"):
        config.require(key, (False,), False)
    config.require("hidden_activation", ("gelu",), "gelu")
    config.require("position_embedding_type", ("absolute", "sans_pos"), "absolute")
    spec = ModelSpec(
        arch="modernbert",
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        dim=config.size("hidden_size"),
        hidden=config.size("intermediate_size"),
        vocab=config.size("vocab_size"),
        max_len=config.size("max_position_embeddings"),
        eps=config.number("norm_eps", 1e-5),
        attn=bert.read_attention(config.size("hidden_size"), config.size("num_attention_heads")),
        act="gelu",
        biases=frozenset(),
        segments=0,
    )
    period = config.size("global_attn_every_n_layers", PERIOD)
    sliding = config_hf.read_sliding(config, [layer % period != 0 for layer in range(spec.layers)])
    return in_layers(spec, sliding, config.size("local_attention", LOCAL), *read_thetas(config))


def read_thetas(config: ConfigReader) -> tuple[float, float]:
    both = config.table("rope_parameters")
    both.refuse_others(("full_attention", "sliding_attention"))
    found = []
    for kind, key, silent in (
        ("full_attention", "global_rope_theta", FAR),
        ("sliding_attention", "local_rope_theta", NEAR),
    ):
        one = both.table(kind)
        one.refuse_others(("rope_theta", "rope_type"))
        one.require("rope_type", ("default",), "default")
        found.append(one.number("rope_theta", config.number(key, silent, least=1.001), least=1.001))
    return found[0], found[1]


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = replace(bert.read_encoder(config, tensors, "modernbert", KEYS), biases=frozenset())
    period = config.size("attention.sliding_window_pattern", PERIOD)
    sliding = [layer % period != 0 for layer in range(spec.layers)]
    return in_layers(
        spec,
        sliding,
        config.size("attention.sliding_window", LOCAL),
        config.number("rope.freq_base", FAR, least=1.001),
        config.number("rope.freq_base_swa", NEAR, least=1.001),
    )


def in_layers(spec: ModelSpec, sliding: Sequence[bool], local: int, far: float, near: float) -> ModelSpec:
    """Returns the spec with a window of `local` positions, half on each side, in the sliding layers."""
    if local < 2:
        raise UnsupportedModel(f"local_attention = {local} is not supported; supported: from 2 on")
    whole, windowed = (
        replace(spec.attn, rope=RopeSpec(rope.plain(base, spec.attn.head_dim), interleaved=False))
        for base in (far, near)
    )
    windowed = replace(windowed, window=local // 2 + 1)  # the current position and half of `local` on each side
    return spec.with_attention([windowed if one else whole for one in sliding])


@dataclass(frozen=True, slots=True)
class ModernBert:
    """Computes an encoder's hidden states, from which embeddings are pooled."""

    embed: Weight
    embed_norm: decoder.Norm
    layers: tuple[decoder.Layer, ...]
    norm: decoder.Norm

    def forward(self, ops: Ops[V]) -> V:
        """Returns the hidden states of the sampled rows, [S, dim]; an encoder has no logits."""
        x, _ = self.embed_norm(ops, ops.embed(self.embed))
        # The first layer has no attention norm.
        first, *others = self.layers
        y = first.mixer.part(ops, x)
        x, residual = first.mlp(ops, y, x)
        for layer in others:
            x, residual = layer(ops, x, residual)
        x, _ = self.norm(ops, x, residual)
        ops.pool(x)
        return ops.take_sampled(x)


def build(spec: ModelSpec, pack: Packer) -> ModernBert:
    def norm(name: str) -> decoder.Norm:
        return decoder.unbiased_layer_norm(spec, pack, name)

    def block(layer: int, kind: str, make: decoder.MakePart) -> decoder.Block:
        before = None if (layer, kind) == (0, "attn") else norm(f"layers.{layer}.{kind}_norm")
        return decoder.Block(make(spec, pack, layer), before, None)

    return ModernBert(
        embed=pack.matrix(("embed", spec.vocab), width=spec.dim),
        embed_norm=norm("embed_norm"),
        layers=tuple(
            decoder.Layer(block(at, "attn", decoder.attention), block(at, "mlp", decoder.mlp_or_experts))
            for at in range(spec.layers)
        ),
        norm=norm("norm"),
    )
