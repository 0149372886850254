"""Finds the multi-token prediction (MTP) head of a checkpoint, and loads it with the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from penstock.config import MTP
from penstock.errors import ConfigError
from penstock.model import eagle, names
from penstock.model.config_reader import ConfigReader
from penstock.model.decoder import Decoder, Ends
from penstock.model.eagle import EagleHead
from penstock.model.families import mtp
from penstock.model.families.mla import SparseDecoder
from penstock.model.formats.checkpoint import weights_of
from penstock.model.gguf.shards import read_shards
from penstock.model.load import CONFIG, Checkpoint, check_biases, read_safetensors_shards
from penstock.model.names import Naming
from penstock.model.packer import Packer, Packs
from penstock.model.registry import PackedModel, family
from penstock.model.spec import ModelSpec
from penstock.model.split_fused import split_fused
from penstock.model.tensor import Tensor

FAMILIES = ("deepseek2", "deepseek32", "glmdsa", "glm4moe", "qwen3next", "qwen35")
FOLDER_PARTS = {"eh_proj": "eh_proj", "embed_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
GGUF_PARTS = {
    "eh_proj": "nextn.eh_proj",
    "embed_norm": "nextn.enorm",
    "hidden_norm": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}
SHARED = re.compile(  # copies of the model's embeddings and output head
    r"(embed_tokens|shared_head\.head|nextn\.embed_tokens|nextn\.shared_head_head)\..+"
)
MODULE = re.compile(r"mtp\.(?:layers\.0\.)?(.+)")  # Qwen's head is a module of its own
MODULE_PARTS = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


def open_mtp(target: Checkpoint) -> Checkpoint:
    """Opens the first MTP head in a model's checkpoint. Raises ConfigError if there is none."""
    kind = family(target.spec.arch)
    if target.path.is_dir():
        naming, found = kind.HUGGING_FACE.but(**FOLDER_PARTS), stored_in_folder(target, kind.HUGGING_FACE)
    else:
        naming, found = kind.GGUF.but(**GGUF_PARTS), stored_in_file(target, kind.GGUF)
    if target.spec.arch not in FAMILIES or not found:
        raise ConfigError(
            f"--draft {MTP}: {target.name} has no MTP head, which some checkpoints of DeepSeek V3, GLM-4.5 and later, "
            "Qwen3-Next and Qwen3.5 have: leave it out, or name a draft model"
        )
    spec = head_spec(target.spec)
    tensors = names.canonical(found, naming, spec)
    if not any(name.startswith(f"{mtp.NAME}.router") for name in tensors):
        spec = replace(spec, dense=frozenset((0,)))
    tensors = split_fused(tensors, spec)
    check_biases(spec, tensors)
    return replace(target, spec=spec, tensors=tensors, classifier=None, unknown=(), dense=None)


def head_spec(spec: ModelSpec) -> ModelSpec:
    """Returns the spec of an MTP head: one layer with the model's full attention and experts."""
    return replace(
        spec,
        arch=MTP,
        layers=1,
        unused_layers=0,
        dense=frozenset(),
        recurrence=None,
        recurrent=frozenset(),
        layer_attn=(),
        layer_hidden=(),
        stores_hidden=False,
    )


def is_head(draft: Checkpoint) -> bool:
    return draft.spec.arch == MTP or isinstance(draft, EagleHead)


def beside(target: Checkpoint, draft: Checkpoint | None) -> Checkpoint:
    """Returns the target as loaded with its draft; with a head, it stores hidden states."""
    if isinstance(draft, EagleHead):
        return eagle.observed(target, draft)
    return replace(target, spec=replace(target.spec, stores_hidden=draft is not None and is_head(draft)))


def load_head(head: Checkpoint, model: PackedModel, backend: Packs) -> PackedModel:
    pack = Packer(head.tensors, backend)
    ends = ends_of(model)
    made = eagle.build(head, pack, ends) if isinstance(head, EagleHead) else mtp.build(head.spec, pack, ends)
    pack.check_all_used()
    return made


def ends_of(model: PackedModel) -> Ends:
    inner = model.decoder if isinstance(model, SparseDecoder) else model
    assert isinstance(inner, Decoder), "all families that have heads are decoders"
    return inner.ends


def stored_in_folder(target: Checkpoint, naming: Naming) -> dict[str, Tensor]:
    files = read_safetensors_shards(target.path)
    mine = {name: files[name] for name, _ in in_first_layer(files, naming, target.spec.layers)}
    weights = weights_of(mine, ConfigReader(target.metadata, CONFIG), target.path)
    return {
        f"model.layers.0.{part}": weights[name] for name, part in in_first_layer(weights, naming, target.spec.layers)
    }


def stored_in_file(target: Checkpoint, naming: Naming) -> dict[str, Tensor]:
    tensors = read_shards(target.path).tensors
    found = in_first_layer(tensors, naming, target.spec.layers)
    return {f"blk.0.{part}": tensors[name] for name, part in found}


def in_first_layer(tensors: Mapping[str, Tensor], naming: Naming, layers: int) -> Iterator[tuple[str, str]]:
    """Yields the head's tensor names and their names within a layer. The head is the layer after the last one, or a
    separate module.
    """
    for name in tensors:
        layer, module = naming.layer.fullmatch(name), MODULE.fullmatch(name)
        if layer and int(layer[1]) == layers:
            part = layer[2]
        elif module:
            stem, _, suffix = module[1].rpartition(".")
            part = f"{MODULE_PARTS.get(stem, stem)}.{suffix}"
        else:
            continue
        if not SHARED.fullmatch(part):
            yield name, part
