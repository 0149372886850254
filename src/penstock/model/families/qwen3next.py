"""Reads Qwen3-Next: gated delta nets, gated attention in every fourth layer, and experts with a gated shared one. A
multi-token prediction (MTP) layer can draft.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.model import config_hf, names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import hybrid
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

SHARED = {
    "shared.router": "mlp.shared_expert_gate",
    "shared.gate": "mlp.shared_expert.gate_proj",
    "shared.up": "mlp.shared_expert.up_proj",
    "shared.down": "mlp.shared_expert.down_proj",
}
HYBRID = {  # names shared with Qwen3.5
    **names.EXPERTS,
    **SHARED,
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "conv": "linear_attn.conv1d",
    "decay_log": "linear_attn.A_log",
    "dt": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.norm",
    "delta_o": "linear_attn.out_proj",
}
HUGGING_FACE = names.HUGGING_FACE.but(
    delta_qkvz="linear_attn.in_proj_qkvz", delta_ba="linear_attn.in_proj_ba", **HYBRID
)._replace(ignored=re.compile(r"mtp\..+"))
GGUF = names.GGUF.but(
    mlp_norm="post_attention_norm",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    delta_qkvz="ssm_in",  # older files
    delta_qkv="attn_qkv",
    delta_z="attn_gate",
    delta_ba="ssm_ba",
    conv="ssm_conv1d",
    decay="ssm_a",
    dt="ssm_dt.bias",
    delta_norm="ssm_norm",
    delta_o="ssm_out",
    **{"shared.router": "ffn_gate_inp_shexp"},
)
build = hybrid.build


def read_hf(config: ConfigReader) -> ModelSpec:
    config.require("use_sliding_window", (False,), False)
    spec = hybrid.read_hf(config, config_hf.read_decoder(config, "qwen3next", partial=True))
    return hybrid.read_experts(config, spec, config.flag("norm_topk_prob", True))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(
        config, tensors, "qwen3next", interleaved=False, partial=True, keys=hybrid.GGUF_KEYS, experts=True
    )
    return hybrid.read_gguf_experts(config, hybrid.read_gguf(config, spec, tiled=False))
