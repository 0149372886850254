"""Reads GPT-NeoX, Pythia and Dolly: attention and MLP in parallel with a layer norm each, RoPE on part of each head,
and biases everywhere.

GGUF files do not name the activation. The family assumes Pythia's exact GELU; llama.cpp computes the tanh
approximation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import gpt2
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

TOP = {"embed_in": "embed", "final_layer_norm": "norm"}
HUGGING_FACE = names.Naming(  # optionally prefixed by the outer model
    top=TOP | {f"gpt_neox.{theirs}": ours for theirs, ours in TOP.items()} | {"embed_out": "head", "lm_head": "head"},
    layer=re.compile(rf"(?:gpt_neox\.)?layers\.{names.NUMBER}\.(.+)"),
    parts={
        "input_layernorm": "attn_norm", "attention.query_key_value": "grouped_qkv", "attention.dense": "o",
        "post_attention_layernorm": "mlp_norm", "mlp.dense_h_to_4h": "up", "mlp.dense_4h_to_h": "down",
    },
    ignored=re.compile(r".+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"),  # a mask, and values from the config
)  # fmt: skip
GGUF = names.GGUF.but(qkv="attn_qkv")
PARALLEL = "use_parallel_residual"
UNBIASED_ATTENTION = gpt2.BIASES - {"q", "k", "v", "o"}
build = gpt2.build_with_layer_norms


def read_hf(config: ConfigReader) -> ModelSpec:
    config.text("hidden_act"), config.number("layer_norm_eps")  # required: the defaults differ from other families
    config.ignore("is_decoder")  # attention is always causal
    older = {
        "rope_theta": config.number("rotary_emb_base", 10000.0, least=1.001),
        "partial_rotary_factor": config.number("rotary_pct", 0.25),
    }
    spec = config_hf.read_decoder(
        config,
        "gptneox",
        eps_key="layer_norm_eps",
        partial=True,
        scaling=config_hf.rope_fields(config).with_defaults(older),
        acts=gpt2.ACTS,
    )
    biases = gpt2.BIASES if config.flag("attention_bias", True) else UNBIASED_ATTENTION
    return replace(spec, biases=biases, parallel=config.flag(PARALLEL, True))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(
        config,
        tensors,
        "gptneox",
        interleaved=False,
        partial=True,
        eps_key=gguf_config.LAYER_EPS,
        keys=(PARALLEL,),
    )
    return replace(spec, act="gelu", parallel=config.flag(PARALLEL, True))
