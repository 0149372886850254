"""Reads MiniCPM: Llama with multipliers of embeddings, residual additions and logits.

They are Granite's under other names: a part's output is multiplied by `scale_depth` over the root of the number of
layers, and logits by `dim_model_base` over the width. GGUF files without them are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import granite, llama
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE
GGUF = names.GGUF
KEYS = ("embedding_scale", "logit_scale", "residual_scale")
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    spec = config_hf.read_decoder(config, "minicpm", tied=True)
    return granite.multiplied(
        spec,
        embedding=config.number("scale_emb", 1.0),
        residual=config.number("scale_depth", 1.0) / spec.layers**0.5,
        attention=spec.attn.scale,
        logits=config.number("dim_model_base", 1.0) / spec.dim,
    )


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(config, tensors, "minicpm", interleaved=True, keys=KEYS)
    for key in KEYS:
        config.number(key)  # required: the default differs from other families
    return granite.read_scales(config, spec)
