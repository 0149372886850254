"""Reads Falcon and Falcon 2: attention and MLP in parallel after one layer norm (7B, 11B) or one each (40B, 180B),
multi-query or grouped-query attention, RoPE, and an MLP without a gate.

Models with ALiBi (Falcon RW) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import MAX_LAYERS, ConfigReader
from penstock.model.families import gpt2
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import AttentionSpec, ModelSpec
from penstock.model.tensor import Tensor

TOP = {"word_embeddings": "embed", "ln_f": "norm"}
HUGGING_FACE = names.Naming(  # optionally prefixed by the outer model
    top=TOP | {f"transformer.{theirs}": ours for theirs, ours in TOP.items()} | {"lm_head": "head"},
    layer=re.compile(rf"(?:transformer\.)?h\.{names.NUMBER}\.(.+)"),
    parts={
        "input_layernorm": "attn_norm", "ln_attn": "attn_norm", "post_attention_layernorm": "mlp_norm",
        "ln_mlp": "mlp_norm", "self_attention.query_key_value": "grouped_qkv", "self_attention.dense": "o",
        "mlp.dense_h_to_4h": "up", "mlp.dense_4h_to_h": "down",
    },
    ignored=re.compile(r".+\.inv_freq"),  # computed from the config
)  # fmt: skip
GGUF = names.GGUF.but(qkv="attn_qkv")._replace(  # the first of two norms has the name of a single one
    renamed={"attn_norm_2": {"attn_norm": "mlp_norm", "attn_norm_2": "attn_norm"}}
)
NORMS = frozenset(("attn_norm", "mlp_norm", "norm"))
build = gpt2.build_with_layer_norms


def read_hf(config: ConfigReader) -> ModelSpec:
    config.require("alibi", (False,), False)
    config.require("activation", tuple(gpt2.ACTS), "gelu")
    config.require("apply_residual_connection_post_layernorm", (False,), False)
    dim, max_len = config.size("hidden_size"), config.size("max_position_embeddings", 2048)
    return ModelSpec(
        arch="falcon",
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        dim=dim,
        hidden=config.size("ffn_hidden_size", 4 * dim),
        vocab=config.size("vocab_size"),
        max_len=max_len,
        eps=config.number("layer_norm_epsilon", 1e-5),
        attn=read_attention(config, dim, max_len),
        act=gpt2.ACTS[config.text("activation", "gelu")],
        tied=config.flag(config_hf.TIED, True),
        biases=gpt2.BIASES if config.flag("bias", False) else NORMS,
        parallel=config.flag("parallel_attn", True),
    )


def read_attention(config: ConfigReader, dim: int, max_len: int) -> AttentionSpec:
    """Reads the heads. Without `new_decoder_architecture`, all heads share one KV head or each has its own."""
    heads = config.size("num_attention_heads")
    grouped, multi_query = config.size("num_kv_heads", heads), config.flag("multi_query", True)
    config.ignore("num_ln_in_parallel_attn")  # visible in the tensors
    if config.flag("new_decoder_architecture", False):
        config.require("parallel_attn", (True,), True)
        kv_heads = grouped
    else:
        kv_heads = 1 if multi_query else heads
    return AttentionSpec(heads, kv_heads, dim // heads, config_hf.read_rope(config, dim // heads, max_len))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    config.require("tensor_data_layout", ("jploski",), "jploski")  # all queries, then keys, then values
    spec = gguf_config.read_decoder(config, tensors, "falcon", interleaved=False, eps_key=gguf_config.LAYER_EPS)
    return replace(spec, act="gelu", parallel=True)
