"""Reads and builds Nomic's BERT embedding models (nomic-embed-text v1 and v1.5): RoPE instead of learned positions,
gated MLPs, and biases only in norms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, decoder, names, rope
from penstock.model.config_hf import ACTS
from penstock.model.config_reader import MAX_LAYERS, ConfigReader
from penstock.model.families import bert
from penstock.model.packer import Packer
from penstock.model.spec import ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

PARTS = {
    "attn.Wqkv": "qkv", "attn.out_proj": "o", "norm1": "attn_norm",
    "mlp.fc11": "up", "mlp.fc12": "gate", "mlp.fc2": "down", "norm2": "mlp_norm",
}  # fmt: skip
HUGGING_FACE = names.Naming(
    top={
        "embeddings.word_embeddings": "embed",
        "embeddings.token_type_embeddings": "types",
        "emb_ln": "embed_norm",
    },
    layer=re.compile(rf"encoder\.layers\.{names.NUMBER}\.(.+)"),
    parts=PARTS,
    ignored=re.compile(r"(pooler|cls)\..+"),
)
GGUF = bert.GGUF.but(qkv="attn_qkv")
BIASES = frozenset(("attn_norm", "mlp_norm", "embed_norm"))
COMPUTED = {  # the only supported values
    "activation_function": "swiglu",
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_rms_norm": False,
}
NOT_COMPUTED = (  # training options; the last field is about longer texts
    *("attn_pdrop", "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "pad_vocab_size_multiple"),
    *("parallel_block_tied_norm", "reorder_and_upcast_attn", "use_flash_attn", "use_xentropy"),
    *(f"summary_{what}" for what in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")),
    "rotary_scaling_factor",
)
TRAINED = 2048  # default context of its first config
THETA = 1000.0
KEYS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "layer_norm_eps")
FIRST_KEYS = ("n_embd", "n_head", "n_layer", "n_inner", "layer_norm_epsilon")


def read_hf(config: ConfigReader) -> ModelSpec:
    config.ignore(*bert.NOT_COMPUTED)
    if "n_embd" in config:
        return read_first(config)
    config.require("hidden_act", tuple(ACTS), "silu")
    spec = read_sizes(config, KEYS, config.size("max_position_embeddings"))
    config.require("head_dim", (spec.attn.head_dim,), spec.attn.head_dim)
    rotation = config_hf.read_rope(config, spec.attn.head_dim, spec.max_len, THETA)
    return replace(spec, attn=replace(spec.attn, rope=rotation), act=ACTS[config.text("hidden_act", "silu")])


def read_first(config: ConfigReader) -> ModelSpec:
    config.ignore(*NOT_COMPUTED)
    for key, value in COMPUTED.items():
        config.require(key, (value,))
    max_len = min(config.size("n_positions"), config.size("max_trained_positions", TRAINED))
    spec = read_sizes(config, FIRST_KEYS, max_len)
    freqs = rope.plain(config.number("rotary_emb_base", THETA, least=1.001), spec.attn.head_dim)
    return replace(spec, attn=replace(spec.attn, rope=RopeSpec(freqs, interleaved=False)))


def read_sizes(config: ConfigReader, keys: tuple[str, ...], max_len: int) -> ModelSpec:
    width, heads, layers, hidden, eps = keys
    dim = config.size(width)
    return ModelSpec(
        arch="nomic_bert",
        layers=config.size(layers, most=MAX_LAYERS),
        dim=dim,
        hidden=config.size(hidden),
        vocab=config.size("vocab_size"),
        max_len=max_len,
        eps=config.number(eps, 1e-12),
        attn=bert.read_attention(dim, config.size(heads)),
        biases=BIASES,
        segments=config.size("type_vocab_size", 2),
    )


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = bert.read_encoder(config, tensors, "nomic_bert", {"rope.freq_base"})
    freqs = rope.plain(config.number("rope.freq_base", THETA, least=1.001), spec.attn.head_dim)
    return replace(spec, attn=replace(spec.attn, rope=RopeSpec(freqs, interleaved=False)), act="silu", biases=BIASES)


def build(spec: ModelSpec, pack: Packer) -> bert.Bert:
    """Builds an encoder with RoPE; its position table only holds the first token type's embedding."""
    positions = pack.repeated("types", spec.max_len, spec.dim)
    return bert.assemble(spec, pack, positions, decoder.mlp_or_experts)
