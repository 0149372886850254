"""Reads DistilBERT: BERT without token types. Its GGUF files use BERT's architecture name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.model import names
from penstock.model.config_reader import MAX_LAYERS, ConfigReader
from penstock.model.families import bert
from penstock.model.families.gpt2 import ACTS
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

WHOLE = r"(?:distilbert\.)?"  # optional prefix of files saved with a head
HUGGING_FACE = names.Naming(
    top={
        f"{model}embeddings.{theirs}": ours
        for model in ("", "distilbert.")
        for theirs, ours in {
            "word_embeddings": "embed",
            "position_embeddings": "positions",
            "LayerNorm": "embed_norm",
        }.items()
    },
    layer=re.compile(rf"{WHOLE}transformer\.layer\.{names.NUMBER}\.(.+)"),
    parts={
        "attention.q_lin": "q", "attention.k_lin": "k", "attention.v_lin": "v", "attention.out_lin": "o",
        "sa_layer_norm": "attn_norm", "ffn.lin1": "up", "ffn.lin2": "down", "output_layer_norm": "mlp_norm",
    },
    ignored=re.compile(rf"{WHOLE}embeddings\.position_ids|vocab_(transform|layer_norm|projector)\..+"),  # training only
)  # fmt: skip
GGUF = bert.GGUF
EPS = 1e-12  # not in the config
NOT_COMPUTED = ("qa_dropout", "seq_classif_dropout", "tie_weights_", "tie_word_embeddings")
build = bert.build


def read_hf(config: ConfigReader) -> ModelSpec:
    config.ignore(*NOT_COMPUTED, "sinusoidal_pos_embds")  # the table is stored either way
    config.require("activation", tuple(ACTS), "gelu")
    dim = config.size("dim")
    return ModelSpec(
        arch="distilbert",
        layers=config.size("n_layers", most=MAX_LAYERS),
        dim=dim,
        hidden=config.size("hidden_dim"),
        vocab=config.size("vocab_size"),
        max_len=config.size("max_position_embeddings"),
        eps=EPS,
        attn=bert.read_attention(dim, config.size("n_heads")),
        act=ACTS[config.text("activation", "gelu")],
        biases=bert.BIASES,
        segments=0,
    )


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    return bert.read_gguf(config, tensors)
