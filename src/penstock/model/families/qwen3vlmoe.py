"""Reads the text part of Qwen3-VL MoE: Qwen3-MoE. Expert matrices are (in, out) in published folders and (out, in) when
saved by transformers.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.model import config_hf
from penstock.model.config_reader import ConfigReader
from penstock.model.families import qwen3moe
from penstock.model.spec import ModelSpec

EITHER = {
    "experts.gate_up_either": "mlp.experts.gate_up_proj",
    "experts.down_either": "mlp.experts.down_proj",
}
HUGGING_FACE = qwen3moe.HUGGING_FACE.but(**EITHER)
GGUF = qwen3moe.GGUF
build = qwen3moe.build
read_gguf = qwen3moe.read_gguf


def read_hf(config: ConfigReader) -> ModelSpec:
    return config_hf.read_text_part(config, read_text, silent={"norm_topk_prob": True})


def read_text(config: ConfigReader) -> ModelSpec:
    config.require("norm_topk_prob", (True,))  # transformers always renormalizes
    return replace(qwen3moe.read_text(config), arch="qwen3vlmoe")
