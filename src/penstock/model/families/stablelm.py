"""Reads StableLM 3B and StableLM 2: Llama with layer norms, and RoPE on part of each head. StableLM 2 12B norms the
queries and keys of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import cohere
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(
    **{f"{x}_norm.*": f"self_attn.{x}_layernorm.norms.*" for x in "qk"}  # one per head
)
GGUF = names.GGUF.but(q_norm="attn_q_norm", k_norm="attn_k_norm")
NORMS = frozenset(("attn_norm", "mlp_norm", "norm"))
ROTATED_SHARE = "partial_rotary_factor"
PARALLEL = "use_parallel_residual"
build = partial(decoder.build, norm=decoder.layer_norm)


def read_hf(config: ConfigReader) -> ModelSpec:
    config.number("layer_norm_eps")  # required: the default differs from other families
    spec = config_hf.read_decoder(config, "stablelm", eps_key="layer_norm_eps", partial=True)
    spec = cohere.with_qk_norm(spec, config.flag("qk_layernorm", False))
    if ROTATED_SHARE not in config_hf.rope_fields(config):
        config.number(ROTATED_SHARE)
    biases = frozenset(("q", "k", "v")) if config.flag("use_qkv_bias", False) else frozenset()
    return replace(spec, biases=NORMS | biases, parallel=config.flag(PARALLEL, False))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(
        config,
        tensors,
        "stablelm",
        interleaved=False,
        partial=True,
        eps_key=gguf_config.LAYER_EPS,
        keys=(PARALLEL,),
    )
    # Files of sequential models may claim to be parallel; a second norm disproves it.
    parallel = config.flag(PARALLEL, True) and "blk.0.ffn_norm.weight" not in tensors
    return cohere.with_qk_norm(replace(spec, parallel=parallel), "blk.0.attn_q_norm.weight" in tensors)
