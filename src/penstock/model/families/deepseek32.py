"""Reads DeepSeek V3.2: V3 with sparse attention (DSA). In each layer an index of small keys selects the positions that
a token attends to.

Published models multiply index queries and keys by a Hadamard matrix and round them to FP8. The matrix cancels in their
product, so it is left out, as in transformers; index keys have the type of the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.model import decoder, rope
from penstock.model.config_reader import ConfigReader
from penstock.model.families import deepseek2, mla
from penstock.model.packer import Packer
from penstock.model.spec import IndexSpec, ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = deepseek2.HUGGING_FACE.but(
    index_q="self_attn.indexer.wq_b", index_k="self_attn.indexer.wk", index_norm="self_attn.indexer.k_norm",
    index_weights="self_attn.indexer.weights_proj",
)  # fmt: skip
GGUF = deepseek2.GGUF.but(
    index_q="indexer.attn_q_b", index_k="indexer.attn_k", index_norm="indexer.k_norm", index_weights="indexer.proj",
)  # fmt: skip
KEYS = ("attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k")
MAX_HEADS = 1 << 10
MAX_TOP_K = 1 << 20


def build(spec: ModelSpec, pack: Packer) -> mla.SparseDecoder:
    return mla.SparseDecoder(decoder.build(spec, pack, mixer=mla.attention))


def read_hf(config: ConfigReader) -> ModelSpec:
    return read_folder(config, "deepseek32", interleaved=False)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    return read_file(config, tensors, "deepseek32", interleaved=False)


def read_folder(config: ConfigReader, arch: str, *, interleaved: bool) -> ModelSpec:
    """Reads a config.json. `interleaved` describes the index's RoPE; attention's RoPE is always interleaved."""
    config.require("rope_interleave", (True,), True)
    config.require("indexer_rope_interleave", (interleaved,), interleaved)
    spec = replace(deepseek2.read_hf(config), arch=arch)
    kinds = config.strings("layer_types") if "layer_types" in config else ("indexed_attention",)
    if set(kinds) != {"indexed_attention"}:
        raise config.unsupported("layer_types", kinds, ("indexed_attention for each layer",))
    return with_index(config, spec, ("index_n_heads", "index_head_dim", "index_topk"), interleaved)


def read_file(config: ConfigReader, tensors: Mapping[str, Tensor], arch: str, *, interleaved: bool) -> ModelSpec:
    spec = replace(deepseek2.read_gguf(config.without(*KEYS), tensors), arch=arch)
    return with_index(config, spec, KEYS, interleaved)


def with_index(config: ConfigReader, spec: ModelSpec, keys: Sequence[str], interleaved: bool) -> ModelSpec:
    assert spec.mla is not None
    if not spec.mla.q_lora_rank:
        raise config.unsupported("q_lora_rank", None, ("a rank, which index queries are projected from",))
    heads, dims, top_k = keys
    index = IndexSpec(
        heads=config.size(heads, most=MAX_HEADS),
        head_dim=config.size(dims, most=rope.MAX_DIMS),
        top_k=config.size(top_k, most=MAX_TOP_K),
        rope=replace(spec.attn.rope, interleaved=interleaved),
    )
    if index.head_dim % 2 or index.head_dim < 2 * len(index.rope.inv_freq):
        raise config.unsupported(dims, index.head_dim, ("an even number, at least the dimensions that RoPE rotates",))
    biases = None if spec.biases is None else spec.biases | {"index_norm"}
    return replace(spec, attn=replace(spec.attn, index=index), biases=biases)
