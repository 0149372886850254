"""Reads and builds BERT, RoBERTa and XLM-RoBERTa embedding models (MiniLM, BGE, E5, LaBSE): bidirectional attention,
layer norms after attention and MLP, and learned positions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock.errors import MalformedFile
from penstock.model import decoder, names
from penstock.model.config_reader import MAX_LAYERS, ConfigReader
from penstock.model.families.gpt2 import ACTS
from penstock.model.gguf import config as gguf_config
from penstock.model.ops import Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.spec import AttentionSpec, ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

WHOLE = r"(?:bert\.|roberta\.)?"  # optional prefix of files saved with a head
PARTS = {
    "attention.self.query": "q", "attention.self.key": "k", "attention.self.value": "v",
    "attention.output.dense": "o", "attention.output.LayerNorm": "attn_norm",
    "intermediate.dense": "up", "output.dense": "down", "output.LayerNorm": "mlp_norm",
}  # fmt: skip
HUGGING_FACE = names.Naming(
    top={
        f"{model}embeddings.{theirs}": ours
        for model in ("", "bert.", "roberta.")
        for theirs, ours in {
            "word_embeddings": "embed",
            "position_embeddings": "positions",
            "token_type_embeddings": "types",
            "LayerNorm": "embed_norm",
        }.items()
    },
    layer=re.compile(rf"{WHOLE}encoder\.layer\.{names.NUMBER}\.(.+)"),
    parts=PARTS,
    ignored=re.compile(rf"{WHOLE}(embeddings\.position_ids|pooler\..+)|(cls|lm_head)\..+"),  # training only
)
GGUF = names.GGUF._replace(
    top={"token_embd": "embed", "position_embd": "positions", "token_types": "types", "token_embd_norm": "embed_norm"}
).but(attn_norm="attn_output_norm", mlp_norm="layer_output_norm")

BIASES = frozenset(("q", "k", "v", "o", "up", "down", "attn_norm", "mlp_norm", "embed_norm"))
NOT_COMPUTED = (  # training options, and heads that embeddings do not use
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "directionality",
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "id2label",
    "label2id",
    "output_past",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "tie_word_embeddings",
)
KEYS = {
    "attention.causal",
    "attention.head_count",
    "attention.layer_norm_epsilon",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "pooling_type",
    "vocab_size",
}


def read_hf(config: ConfigReader) -> ModelSpec:
    config.ignore(*NOT_COMPUTED)
    for key in ("is_decoder", "add_cross_attention"):
        config.require(key, (False,), False)
    config.require("position_embedding_type", ("absolute",), "absolute")
    config.require("hidden_act", tuple(ACTS), "gelu")
    skipped = 0 if config.strings("architectures")[0].startswith("Bert") else config.count("pad_token_id", 1) + 1
    return ModelSpec(
        arch="bert",
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        dim=config.size("hidden_size"),
        hidden=config.size("intermediate_size"),
        vocab=config.size("vocab_size"),
        max_len=config.size("max_position_embeddings") - skipped,
        eps=config.number("layer_norm_eps", 1e-12),
        attn=read_attention(config.size("hidden_size"), config.size("num_attention_heads")),
        act=ACTS[config.text("hidden_act", "gelu")],
        biases=BIASES,
        first_position=skipped,
        segments=config.size("type_vocab_size", 2),
    )


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    return read_encoder(config, tensors, "bert")


def read_encoder(
    config: ConfigReader, tensors: Mapping[str, Tensor], arch: str, keys: Collection[str] = ()
) -> ModelSpec:
    """Reads an encoder's metadata; `keys` are the family's extra keys."""
    config.refuse_others(KEYS.union(keys))
    config.require("attention.causal", (False,), False)
    if "token_embd.weight" not in tensors:
        raise MalformedFile("the file has no tensor 'token_embd.weight'; it may be a part of a model, or another kind")
    return ModelSpec(
        arch=arch,
        layers=config.size("block_count", most=MAX_LAYERS),
        dim=config.size("embedding_length"),
        hidden=config.size("feed_forward_length"),
        vocab=tensors["token_embd.weight"].shape[0],
        max_len=config.size("context_length"),
        eps=config.number("attention.layer_norm_epsilon"),
        attn=read_attention(config.size("embedding_length"), config.size("attention.head_count")),
        act="gelu",
        biases=BIASES,
        pooling=gguf_config.read_pooling(config),
        segments=tensors["token_types.weight"].shape[0] if "token_types.weight" in tensors else 0,
    )


def read_attention(dim: int, heads: int) -> AttentionSpec:
    if dim % heads:
        raise MalformedFile(f"{dim} dimensions cannot be shared evenly by {heads} heads")
    return AttentionSpec(heads, heads, dim // heads, RopeSpec((), interleaved=False), causal=False)


@dataclass(frozen=True, slots=True)
class PostNormBlock:
    """Applies a part and norms the sum of its input and output."""

    part: decoder.Part
    norm: decoder.Norm

    def __call__(self, ops: Ops[V], x: V) -> V:
        return self.norm(ops, self.part(ops, x), x)[0]


@dataclass(frozen=True, slots=True)
class Bert:
    """Computes an encoder's hidden states, from which embeddings are pooled."""

    embed: Weight
    positions: Weight
    norm: decoder.Norm
    blocks: tuple[PostNormBlock, ...]

    def forward(self, ops: Ops[V]) -> V:
        """Returns the hidden states of the sampled rows, [S, dim]; an encoder has no logits."""
        x, _ = self.norm(ops, ops.embed(self.embed), ops.embed_positions(self.positions))
        for block in self.blocks:
            x = block(ops, x)
        ops.pool(x)
        return ops.take_sampled(x)


def build(spec: ModelSpec, pack: Packer) -> Bert:
    """Builds an encoder with learned positions, which include the embedding of the first token type."""
    types = "types" if spec.segments else ""
    positions = pack.table("positions", spec.first_position, spec.max_len, spec.dim, plus=types)
    return assemble(spec, pack, positions, decoder.plain_mlp)


def embeddings(spec: ModelSpec, pack: Packer) -> Weight:
    """Builds the table of token embeddings. A copy for a pair's second text follows, with its token type added, so that
    the token id selects the text and backends need no token types.
    """
    if spec.token_ids == spec.vocab:
        return pack.matrix(("embed", spec.vocab), width=spec.dim)
    return pack.twice("embed", spec.vocab, spec.dim, types="types")


def assemble(
    spec: ModelSpec,
    pack: Packer,
    positions: Weight,
    mlp: decoder.MakePart,
    attention: decoder.MakePart = decoder.attention,
) -> Bert:
    def block(layer: int, kind: str, make: decoder.MakePart) -> PostNormBlock:
        return PostNormBlock(make(spec, pack, layer), decoder.layer_norm(spec, pack, f"layers.{layer}.{kind}_norm"))

    return Bert(
        embed=embeddings(spec, pack),
        positions=positions,
        norm=decoder.layer_norm(spec, pack, "embed_norm"),
        blocks=tuple(
            block(layer, kind, make)
            for layer in range(spec.layers)
            for kind, make in (("attn", attention), ("mlp", mlp))
        ),
    )
