"""Phi-3 and Phi-4: Llama with q, k and v in one tensor, gate and up in another; ropes may turn a part of a head.

Longer contexts by `longrope` are refused: its frequencies change when a sequence grows beyond the original context,
and keys that were turned before do not.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import UnsupportedModel
from penstock.model import config_gguf, config_hf, llama, names
from penstock.model.fields import Fields
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
GGUF = names.GGUF.but(qkv="attn_qkv", gate_up="ffn_up")
build = llama.build


def read_hf(config: Fields) -> ModelSpec:
    for bias in ("attention_bias", "lm_head_bias", "mlp_bias"):
        config.require(bias, (False,), False)
    spec = config_hf.read_decoder(config, "phi3", partial=True)
    return spec.with_windows([True] * spec.layers, config_hf.read_window(config, silent=0))


def read_gguf(config: Fields, tensors: Mapping[str, Tensor]) -> ModelSpec:
    if "rope_factors_long.weight" in tensors:
        raise UnsupportedModel(
            "the file has 'rope_factors_long.weight': contexts stretched by longrope are not supported"
        )
    spec = config_gguf.read_decoder(
        config, tensors, "phi3", interleaved=False, partial=True, keys=(config_gguf.WINDOW,)
    )
    return spec.with_windows([True] * spec.layers, config_gguf.read_window(config))
