"""Reads OPT and Galactica: layer norms, learned positions of which the first two are unused, an MLP with ReLU, and
biases everywhere. OPT 350M norms after each part, and has narrower, projected embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import UnsupportedModel
from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import MAX_LAYERS, ConfigReader
from penstock.model.families import bert, gpt2
from penstock.model.ops import Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.spec import AttentionSpec, ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

TOP = {
    "embed_tokens": "embed", "embed_positions": "positions", "final_layer_norm": "norm",
    "project_in": "project_in", "project_out": "project_out",
}  # fmt: skip
HUGGING_FACE = names.Naming(  # optionally prefixed by the outer model
    top={f"{model}decoder.{theirs}": ours for model in ("", "model.") for theirs, ours in TOP.items()}
    | {"lm_head": "head"},
    layer=re.compile(rf"(?:model\.)?decoder\.layers\.{names.NUMBER}\.(.+)"),
    parts={
        "self_attn_layer_norm": "attn_norm", "self_attn.q_proj": "q", "self_attn.k_proj": "k",
        "self_attn.v_proj": "v", "self_attn.out_proj": "o",
        "final_layer_norm": "mlp_norm", "fc1": "up", "fc2": "down",
    },
    ignored=re.compile(r"(?!)"),
)  # fmt: skip
GGUF = names.GGUF
UNUSED_POSITIONS = 2
EPS = 1e-5  # layer norms; not in the config
NORMS = frozenset(("attn_norm", "mlp_norm", "norm"))


@dataclass(frozen=True, slots=True)
class NormLastDecoder:
    """Computes logits with post-norm blocks between projections of narrower embeddings."""

    embed: Weight
    positions: Weight
    project_in: Weight | None
    blocks: tuple[bert.PostNormBlock, ...]
    project_out: Weight | None
    head: Weight

    def forward(self, ops: Ops[V]) -> V:
        x = ops.embed(self.embed)
        if self.project_in is not None:
            x = ops.linear(x, self.project_in)
        x = ops.add(x, ops.embed_positions(self.positions))
        for block in self.blocks:
            x = block(ops, x)
        if self.project_out is not None:
            x = ops.linear(x, self.project_out)
        ops.pool(x)
        return ops.linear(ops.take_sampled(x), self.head, precision="float32")


def build(spec: ModelSpec, pack: Packer) -> decoder.Decoder | NormLastDecoder:
    if not spec.norm_last:
        return gpt2.build(spec, pack)
    width = spec.embed_dim or spec.dim

    def block(layer: int, kind: str, make: decoder.MakePart) -> bert.PostNormBlock:
        norm = decoder.layer_norm(spec, pack, f"layers.{layer}.{kind}_norm")
        return bert.PostNormBlock(make(spec, pack, layer), norm)

    embed = pack.matrix(("embed", spec.vocab), width=width)
    return NormLastDecoder(
        embed=embed,
        positions=decoder.position_table(spec, pack),
        project_in=pack.matrix(("project_in", spec.dim), width=width) if spec.embed_dim else None,
        blocks=tuple(
            block(layer, kind, make)
            for layer in range(spec.layers)
            for kind, make in (("attn", decoder.attention), ("mlp", decoder.plain_mlp))
        ),
        project_out=pack.matrix(("project_out", width), width=spec.dim) if spec.embed_dim else None,
        head=embed if spec.tied else pack.matrix(("head", spec.vocab), width=width),
    )


def read_hf(config: ConfigReader) -> ModelSpec:
    dim, heads = config.size("hidden_size"), config.size("num_attention_heads")
    config.require("_remove_final_layer_norm", (False,), False)
    config.require("layer_norm_elementwise_affine", (True,), True)
    norm_last = not config.flag("do_layer_norm_before", True)
    embed_dim = config.size("word_embed_proj_dim", dim)
    if not norm_last:
        config.require("word_embed_proj_dim", (dim,), dim)
    config.require("activation_function", tuple(gpt2.ACTS), "relu")
    return ModelSpec(
        arch="opt",
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        dim=dim,
        hidden=config.size("ffn_dim"),
        vocab=config.size("vocab_size"),
        max_len=config.size("max_position_embeddings"),
        eps=EPS,
        attn=AttentionSpec(heads, heads, dim // heads, RopeSpec((), interleaved=False)),
        act=gpt2.ACTS[config.text("activation_function", "relu")],
        tied=config.flag(config_hf.TIED, True),
        biases=gpt2.BIASES if config.flag("enable_bias", True) else NORMS,
        first_position=UNUSED_POSITIONS,
        embed_dim=0 if embed_dim == dim else embed_dim,
        norm_last=norm_last,
    )


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    raise UnsupportedModel("OPT is read from Hugging Face folders only: GGUF has no such architecture")
