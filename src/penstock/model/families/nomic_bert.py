"""Nomic's BERT: ropes in place of positions, gated MLPs, no biases but those of norms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, decoder, names, rope
from penstock.model.config_hf import ACTS
from penstock.model.config_reader import MAX_LAYERS, ConfigReader
from penstock.model.families import bert
from penstock.model.spec import ModelSpec, RopeSpec
from penstock.model.tensor import Tensor
from penstock.model.weights import Packer

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
COMPUTED = {  # of all that its first config could say
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
NOT_COMPUTED = (  # training and how it was done; the last is for texts beyond those trained on
    *("attn_pdrop", "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "pad_vocab_size_multiple"),
    *("parallel_block_tied_norm", "reorder_and_upcast_attn", "use_flash_attn", "use_xentropy"),
    *(f"summary_{what}" for what in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")),
    "rotary_scaling_factor",
)
TRAINED = 2048  # tokens, where its first config is silent
THETA = 1000.0


def read_hf(config: ConfigReader) -> ModelSpec:
    config.ignore(*bert.NOT_COMPUTED)
    config.size("type_vocab_size", 2)
    if "n_embd" in config:
        return read_first(config)
    config.require("hidden_act", tuple(ACTS), "silu")
    dim, heads = config.size("hidden_size"), config.size("num_attention_heads")
    attn, max_len = bert.read_attention(dim, heads), config.size("max_position_embeddings")
    config.require("head_dim", (attn.head_dim,), attn.head_dim)
    return ModelSpec(
        arch="nomic_bert",
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        dim=dim,
        hidden=config.size("intermediate_size"),
        vocab=config.size("vocab_size"),
        max_len=max_len,
        eps=config.number("layer_norm_eps", 1e-12),
        attn=replace(attn, rope=config_hf.read_rope(config, attn.head_dim, max_len, THETA)),
        act=ACTS[config.text("hidden_act", "silu")],
        biases=BIASES,
    )


def read_first(config: ConfigReader) -> ModelSpec:
    """As its published folders have it, in the words of GPT-2."""
    config.ignore(*NOT_COMPUTED)
    for key, value in COMPUTED.items():
        config.require(key, (value,))
    dim, heads = config.size("n_embd"), config.size("n_head")
    attn = bert.read_attention(dim, heads)
    freqs = rope.plain(config.number("rotary_emb_base", THETA, least=1.001), attn.head_dim)
    return ModelSpec(
        arch="nomic_bert",
        layers=config.size("n_layer", most=MAX_LAYERS),
        dim=dim,
        hidden=config.size("n_inner"),
        vocab=config.size("vocab_size"),
        max_len=min(config.size("n_positions"), config.size("max_trained_positions", TRAINED)),
        eps=config.number("layer_norm_epsilon", 1e-12),
        attn=replace(attn, rope=RopeSpec(freqs, interleaved=False)),
        biases=BIASES,
    )


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = bert.read_encoder(config, tensors, "nomic_bert", {"rope.freq_base"})
    freqs = rope.plain(config.number("rope.freq_base", THETA, least=1.001), spec.attn.head_dim)
    return replace(spec, attn=replace(spec.attn, rope=RopeSpec(freqs, interleaved=False)), act="silu", biases=BIASES)


def build(spec: ModelSpec, pack: Packer) -> bert.Bert:
    """Builds an encoder with ropes: the table of positions only adds the embedding of the first token type."""
    positions = pack.repeated("types", spec.max_len, spec.dim)
    return bert.assemble(spec, pack, positions, decoder.mlp_or_experts)
