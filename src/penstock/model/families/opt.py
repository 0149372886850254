"""Reads OPT and Galactica: layer norms, learned positions of which the first two stay unused, an MLP with ReLU, and
biases everywhere.

OPT 350M, which norms after each part and has narrower embeddings, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.errors import UnsupportedModel
from penstock.model import config_hf, names
from penstock.model.config_reader import MAX_LAYERS, ConfigReader
from penstock.model.families import gpt2
from penstock.model.spec import AttentionSpec, ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

TOP = {"embed_tokens": "embed", "embed_positions": "positions", "final_layer_norm": "norm"}
HUGGING_FACE = names.Naming(  # with the prefix of the whole model, or as its inner one is saved
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
EPS = 1e-5  # of layer norms; the config does not say it
NORMS = frozenset(("attn_norm", "mlp_norm", "norm"))
build = gpt2.build


def read_hf(config: ConfigReader) -> ModelSpec:
    dim, heads = config.size("hidden_size"), config.size("num_attention_heads")
    config.require("do_layer_norm_before", (True,), True)
    config.require("_remove_final_layer_norm", (False,), False)
    config.require("layer_norm_elementwise_affine", (True,), True)
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
    )


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    raise UnsupportedModel("OPT is read from Hugging Face folders only: GGUF has no such architecture")
