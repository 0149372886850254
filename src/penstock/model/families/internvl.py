"""Reads the text part of InternVL 3 and 3.5, a Qwen2, Qwen3 or Qwen3-MoE. GGUF files name that architecture
directly.
"""

from __future__ import annotations

from penstock.model import config_hf
from penstock.model.config_reader import ConfigReader
from penstock.model.families import llama, qwen2, qwen3, qwen3moe
from penstock.model.spec import ModelSpec

HUGGING_FACE = qwen3moe.HUGGING_FACE
GGUF = qwen3moe.GGUF
READERS = {"qwen2": qwen2.read_text, "qwen3": qwen3.read_text, "qwen3_moe": qwen3moe.read_text}
IMAGES = (  # image tiling and encoding
    *("downsample_ratio", "dynamic_image_size", "force_image_size", "max_dynamic_patch", "min_dynamic_patch"),
    *("pad2square", "ps_version", "select_layer", "template", "use_backbone_lora", "use_llm_lora", "use_thumbnail"),
    *("hidden_size", "image_fold", "system_message"),
)
build = llama.build
read_gguf = qwen3moe.read_gguf


def read_hf(config: ConfigReader) -> ModelSpec:
    key = "llm_config" if "llm_config" in config else "text_config"
    config.ignore(*IMAGES)
    kind = config.table(key).text("model_type")
    if kind not in READERS:
        raise config.table(key).unsupported("model_type", kind, READERS)
    return config_hf.read_text_part(config, READERS[kind], key=key)
