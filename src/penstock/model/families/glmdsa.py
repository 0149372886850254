"""Reads GLM-5: DeepSeek V3.2 with RoPE on neighbouring pairs in the index too. Layers of GLM-5.2 may reuse the
positions that an earlier layer selected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.model.config_reader import COUNTS, ConfigReader
from penstock.model.families import deepseek32
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE, GGUF = deepseek32.HUGGING_FACE, deepseek32.GGUF
TYPES = "attention.indexer.types"  # per layer; 1 means that the layer selects positions
SHARING_CONTEXT = 1 << 20  # files with at least this context share by default
NAMES = {"F": "full", "S": "shared"}  # letters of a pattern
build = deepseek32.build


def read_hf(config: ConfigReader) -> ModelSpec:
    spec = deepseek32.read_folder(config, "glmdsa", interleaved=True)
    config.ignore("index_share_for_mtp_iteration")  # only for omitted layers
    frequency, offset = config.count("index_topk_freq", 1), config.count("index_skip_topk_offset", 2)
    if "indexer_types" in config:
        config.ignore("index_topk_pattern")  # transformers derives the list of types from it
        return with_sharing(config, spec, "indexer_types", config.strings("indexer_types"))
    if "index_topk_pattern" in config:
        letters = config.text("index_topk_pattern")
        return with_sharing(config, spec, "index_topk_pattern", [NAMES.get(letter, letter) for letter in letters])
    return with_sharing(config, spec, "index_topk_freq", each(spec.layers, offset, max(frequency, 1)))


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = deepseek32.read_file(config.without(TYPES), tensors, "glmdsa", interleaved=True)
    if TYPES in config:
        kinds = ["full" if one else "shared" for one in config.array(TYPES, COUNTS)]
        return with_sharing(config, spec, TYPES, kinds[: spec.layers])
    return with_sharing(config, spec, TYPES, each(spec.layers, 3, 4 if spec.max_len >= SHARING_CONTEXT else 1))


def each(layers: int, offset: int, frequency: int) -> list[str]:
    """Returns layer types where every `frequency`-th layer selects positions, starting before `offset`."""
    return ["shared" if max(layer - offset + 1, 0) % frequency else "full" for layer in range(layers)]


def with_sharing(config: ConfigReader, spec: ModelSpec, key: str, kinds: Sequence[str]) -> ModelSpec:
    if len(kinds) != spec.layers or not {"full", "shared"}.issuperset(kinds) or kinds[0] != "full":
        raise config.unsupported(key, list(kinds), ("full or shared for each layer, full for the first",))
    index = spec.attn.index
    assert index is not None
    return spec.with_attention([replace(spec.attn, index=replace(index, shared=kind == "shared")) for kind in kinds])
