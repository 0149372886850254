"""Reads and builds MPNet (all-mpnet-base-v2): BERT without token types, with a relative position bias on scores that
all layers share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from penstock.errors import UnsupportedModel
from penstock.model import decoder, names
from penstock.model.config_reader import MAX_LAYERS, ConfigReader
from penstock.model.families import bert
from penstock.model.families.gpt2 import ACTS
from penstock.model.packer import Floats, Packer
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

WHOLE = r"(?:mpnet\.)?"  # optional prefix of files saved with a head
HUGGING_FACE = names.Naming(
    top={
        f"{model}{theirs}": ours
        for model in ("", "mpnet.")
        for theirs, ours in {
            "embeddings.word_embeddings": "embed",
            "embeddings.position_embeddings": "positions",
            "embeddings.LayerNorm": "embed_norm",
            "encoder.relative_attention_bias": "distance_bias",
        }.items()
    },
    layer=re.compile(rf"{WHOLE}encoder\.layer\.{names.NUMBER}\.(.+)"),
    parts={
        "attention.attn.q": "q", "attention.attn.k": "k", "attention.attn.v": "v", "attention.attn.o": "o",
        "attention.LayerNorm": "attn_norm",
        "intermediate.dense": "up", "output.dense": "down", "output.LayerNorm": "mlp_norm",
    },
    ignored=re.compile(rf"{WHOLE}(embeddings\.position_ids|pooler\..+)|lm_head\..+"),  # training only
)  # fmt: skip
GGUF = bert.GGUF
BUCKETS = 32  # distance buckets; transformers ignores the config's number
REACH = 128  # larger distances share the last bucket
FIRST_POSITION = 2  # first used row of the position table


def build(spec: ModelSpec, pack: Packer) -> bert.Bert:
    heads = spec.attn.heads
    biases = pack.computed("distance_bias", BUCKETS * heads, lambda table: by_distance(table.reshape(BUCKETS, heads)))
    plain = replace(spec, attn=replace(spec.attn, distance_bias=0))

    def attention(spec: ModelSpec, pack: Packer, layer: int) -> decoder.Attention:
        return replace(decoder.attention(plain, pack, layer), spec=spec.attn, vectors={"distance_bias": biases})

    positions = pack.table("positions", spec.first_position, spec.max_len, spec.dim)
    return bert.assemble(spec, pack, positions, decoder.plain_mlp, attention)


def by_distance(table: Floats) -> Floats:
    """Expands each head's bucket biases to all distances from -REACH (key before query) to REACH, flat: [buckets,
    heads] -> [heads * distances].
    """
    return np.ascontiguousarray(table[buckets()].T).reshape(-1)


def buckets() -> np.ndarray:
    """Returns the bucket of each distance from -REACH to REACH. Half of the buckets are for keys after the query. In
    each half, the first half of the buckets hold one distance each, and the rest grow logarithmically.
    """
    distances = np.arange(-REACH, REACH + 1)
    half, exact = BUCKETS // 2, BUCKETS // 4
    far = np.abs(distances)
    ratio = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact))  # float32 determines the bucket limits
    steps = ratio / np.float32(np.log(REACH / exact)) * np.float32(half - exact)
    growing = np.minimum(exact + steps.astype(np.int64), half - 1)
    return np.where(far < exact, far, growing) + np.where(distances > 0, half, 0)


def read_hf(config: ConfigReader) -> ModelSpec:
    for key in ("is_decoder", "add_cross_attention"):
        config.require(key, (False,), False)
    config.require("hidden_act", tuple(ACTS), "gelu")
    config.require("relative_attention_num_buckets", (BUCKETS,), BUCKETS)
    config.ignore("tie_word_embeddings")
    dim = config.size("hidden_size")
    return ModelSpec(
        arch="mpnet",
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        dim=dim,
        hidden=config.size("intermediate_size"),
        vocab=config.size("vocab_size"),
        max_len=config.size("max_position_embeddings") - FIRST_POSITION,
        eps=config.number("layer_norm_eps", 1e-12),
        attn=replace(bert.read_attention(dim, config.size("num_attention_heads")), distance_bias=REACH),
        act=ACTS[config.text("hidden_act", "gelu")],
        biases=bert.BIASES,
        first_position=FIRST_POSITION,
        segments=0,
    )


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    raise UnsupportedModel("MPNet has no GGUF architecture; give its Hugging Face folder")
