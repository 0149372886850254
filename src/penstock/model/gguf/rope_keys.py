"""Translates a Hugging Face folder's RoPE to GGUF keys and factor tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import UnsupportedModel
from penstock.model import config_hf, rope
from penstock.model.config_reader import NUMBERS, ConfigReader
from penstock.model.spec import AttentionSpec, ModelSpec, RopeSpec
from penstock.model.tensor import FORMATS, Tensor

Keys = dict[str, Any]
Tensors = dict[str, Tensor]

SCALED_BY_TENSOR = (
    "llama",
    "llama4",
    "mixtral",
    "granite",
    "granitemoe",
    "minicpm",
    "exaone4",
)  # families whose rope_freqs.weight llama.cpp reads


def global_attention(spec: ModelSpec) -> AttentionSpec:
    """Returns the attention of a layer with RoPE, preferably one without a window."""
    rotating = [attn for attn in (spec.attn, *spec.layer_attn) if attn.rope.inv_freq] or [spec.attn]
    return next((attn for attn in rotating if not attn.window), rotating[0])


def local_attention(spec: ModelSpec) -> AttentionSpec:
    return next((attn for attn in (spec.attn, *spec.layer_attn) if attn.window), spec.attn)


def base_of(config: ConfigReader, freqs: rope.Freqs) -> float:
    for place in (rope_table(config), config):
        if "rope_theta" in place:
            return place.number("rope_theta")
    return plain_base(freqs)


def plain_base(freqs: rope.Freqs) -> float:
    return float((freqs[0] / freqs[1]) ** len(freqs))


def rope_table(config: ConfigReader) -> ConfigReader:
    table = config_hf.rope_fields(config)
    return table.table("full_attention") if "full_attention" in table else table


def rope_keys(config: ConfigReader, spec: ModelSpec) -> tuple[Keys, Tensors]:
    table, spec_rope = rope_table(config), global_attention(spec).rope
    if not spec_rope.inv_freq:
        return {}, {}
    plain = {
        "rope.dimension_count": 2 * len(spec_rope.inv_freq),
        "rope.freq_base": base_of(config, spec_rope.inv_freq),
    }
    if table.text("rope_type", table.text("type", "default")) == "llama3" and spec.arch not in SCALED_BY_TENSOR:
        raise UnsupportedModel(
            f"a GGUF file of {spec.arch} cannot express rope_type = llama3: llama.cpp has no tensor for its factors"
        )
    scaling, tensors = scaling_keys(table, plain["rope.freq_base"], spec_rope, spec.max_len)
    longest = {"context_length": spec.longest} if spec.long else {}
    return plain | scaling | longest, tensors


def scaling_keys(table: ConfigReader, base: float, spec: RopeSpec, max_len: int) -> tuple[Keys, Tensors]:
    match table.text("rope_type", table.text("type", "default")):
        case "linear":
            return {"rope.scaling.type": "linear", "rope.scaling.factor": 1 / spec.inv_freq[0]}, {}
        case "llama3":
            plain = np.array(rope.plain(base, 2 * len(spec.inv_freq)))
            return {}, {"rope_freqs.weight": vector("rope_freqs.weight", plain / spec.inv_freq)}
        case "yarn":
            factor = table.number("factor", 1.0)
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": factor,
                "rope.scaling.original_context_length": table.size("original_max_position_embeddings", max_len),
                "rope.scaling.yarn_beta_fast": table.number("beta_fast", 32.0),
                "rope.scaling.yarn_beta_slow": table.number("beta_slow", 1.0),
                "rope.scaling.attn_factor": spec.scale / rope.yarn_scale(factor),
            }, {}
        case "longrope" | "su":
            names = {f"rope_factors_{which}.weight": f"{which}_factor" for which in ("long", "short")}
            count = len(spec.inv_freq)
            tensors = {name: vector(name, np.array(table.array(key, NUMBERS, count))) for name, key in names.items()}
            return {
                "rope.scaling.original_context_length": max_len,
                "rope.scaling.attn_factor": spec.scale,
            }, tensors
    return {}, {}


def vector(name: str, values: Any) -> Tensor:
    numbers = np.ascontiguousarray(values, "<f4")
    return Tensor(name, FORMATS["F32"], numbers.shape, numbers.view(np.uint8))
