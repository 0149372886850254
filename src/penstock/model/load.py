"""Opens a checkpoint, identifies the model, and has a backend pack it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, MalformedFile, ModelNotFound, UnsupportedModel
from penstock.model import names
from penstock.model.classifier import KEYS as LABEL_KEYS
from penstock.model.classifier import (
    RANKER_KEYS,
    ClassifierHead,
    DenseHead,
    build_head,
    is_ranker,
    read_labels,
    split_head,
    token_head,
    with_ranker,
)
from penstock.model.config_fields import CHANGING, NEUTRAL
from penstock.model.config_reader import ConfigReader
from penstock.model.formats.checkpoint import weights_of
from penstock.model.gguf.shards import read_shards, shard_paths
from penstock.model.low_rank import Placement
from penstock.model.open_files import read_json
from penstock.model.packer import Packer, Packs
from penstock.model.registry import CLASSIFIERS, WITHOUT_HEAD, PackedModel, family, family_of_gguf, family_of_hf
from penstock.model.roles import BIAS, Role
from penstock.model.safetensors import read_safetensors
from penstock.model.sentence_transformers import dense_of_folder, split_dense, with_sentence
from penstock.model.spec import ClassifierSpec, ModelSpec
from penstock.model.split_fused import split_fused
from penstock.model.tensor import Tensor

if TYPE_CHECKING:
    from penstock.text import Text

CONFIG = "config.json"
METADATA = "the GGUF metadata"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_ABOVE = 4  # a width is at most 4 times the largest tensor dimension, because several tensors may form it


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Describes a model whose files are open but not loaded: tensors are views of mapped files."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]  # canonical name: tensor
    name: str
    path: Path
    metadata: Mapping[str, Any]  # GGUF metadata or config.json, with changes applied
    classifier: ClassifierHead | None = None
    unknown: tuple[str, ...] = ()  # unrecognized fields of config.json
    dense: DenseHead | None = None  # maps pooled states to embeddings
    head_files: tuple[Path, ...] = ()  # files of a draft head

    @property
    def fp8(self) -> bool:
        return any(tensor.format.name == "F8_E4M3" for tensor in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        if self.path.is_dir():
            files = sorted(file for file in self.path.iterdir() if file.suffix in (".json", ".safetensors"))
        else:
            count = self.metadata.get("split.count", 1)
            files = shard_paths(self.path, count) if count > 1 else [self.path]
        return [*files, *self.head_files]

    @property
    def embedding_width(self) -> int:
        return self.dense.width if self.dense else self.spec.embed_dim or self.spec.dim

    @property
    def whole(self) -> int:
        """Returns the number of tokens that one step must hold because prompts cannot be split; 0: any."""
        return self.spec.max_len if self.spec.encoder else 0


def open_checkpoint(path: Path, changes: Sequence[str] = (), strict: bool = False, max_len: int = 0) -> Checkpoint:
    """Opens a GGUF file, or a folder with config.json and safetensors. `changes` are KEY=VALUE overrides of
    config.json; `strict` refuses unrecognized fields. `max_len` selects the long-context RoPE of models that have one.
    """
    if changes and not path.is_dir():
        raise ConfigError(f"--config changes the config.json of a folder; {path.name} is a file, which has none")
    checkpoint = open_folder(path, changes, strict) if path.is_dir() else open_gguf(path)
    checkpoint = replace(checkpoint, spec=checkpoint.spec.with_room_for(max_len))
    check_sizes(checkpoint.spec, checkpoint.tensors)
    check_heads(checkpoint.spec)
    check_experts(checkpoint.spec)
    if checkpoint.spec.recurrence:
        checkpoint.spec.recurrence.check()
    check_biases(checkpoint.spec, checkpoint.tensors)
    return checkpoint


def load_model(checkpoint: Checkpoint, backend: Packs) -> PackedModel:
    return load_placed(checkpoint, backend)[0]


def load_placed(checkpoint: Checkpoint, backend: Packs) -> tuple[PackedModel, Sequence[Placement]]:
    """Builds the model with weights that the backend packs; returns it with the tensors of each packed weight."""
    pack = Packer(checkpoint.tensors, backend)
    model = family(checkpoint.spec.arch).build(checkpoint.spec, pack)
    pack.check_all_used()
    return model, pack.placements


def load_text(path: Path, changes: Sequence[str] = ()) -> Text:
    return text_of(open_checkpoint(path, changes))


def text_of(checkpoint: Checkpoint) -> Text:
    from penstock.text import Text

    path = checkpoint.path
    return Text.from_folder(path) if path.is_dir() else Text.from_gguf(checkpoint.metadata)


def open_gguf(path: Path) -> Checkpoint:
    file = read_shards(path)
    kind = family_of_gguf(ConfigReader(file.metadata, METADATA))
    config = ConfigReader(file.metadata, METADATA, prefix=f"{file.metadata['general.architecture']}.")
    tensors, head = split_head(file.tensors) if is_ranker(config) else (file.tensors, {})
    tensors, dense = split_dense(config, tensors)
    spec = kind.read_gguf(config.without(*RANKER_KEYS) if head else config, tensors)
    classifier = None
    if head:
        spec, classifier = with_ranker(config, spec, head)
    return Checkpoint(
        spec=spec,
        tensors=split_fused(names.canonical(tensors, kind.GGUF, spec), spec),
        classifier=classifier,
        name=str(file.metadata.get("general.name", path.stem)),
        path=path,
        metadata=file.metadata,
        dense=dense,
    )


def open_folder(path: Path, changes: Sequence[str] = (), strict: bool = False) -> Checkpoint:
    try:
        values = changed(read_json(path / CONFIG), changes)
    except ModelNotFound:
        raise ModelNotFound(f"there is no model in {path}: it has neither a {CONFIG} nor a GGUF file") from None
    config = ConfigReader(values, CONFIG)
    spec = with_known_reranker(with_sentence(read_fields(config), path), path)
    if strict and config.unknown:
        raise UnsupportedModel(unknown_line(config.unknown))
    naming = family(spec.arch).HUGGING_FACE
    files, head = read_safetensors_shards(path), dict[str, Tensor]()
    if spec.classifier and not spec.classifier.tokens:
        files, head = split_head(files)
    stored = {name: tensor for name, tensor in files.items() if not naming.ignored.fullmatch(name)}
    weights = weights_of(stored, ConfigReader(values, CONFIG), path)
    if names.is_bare(weights):
        weights = names.within_model(weights)
        spec = spec if spec.tied or spec.classifier else without_head(spec)
    tensors = split_fused(names.canonical(weights, naming, spec), spec)
    if spec.tied:
        tensors.pop("head", None)  # some checkpoints store the embedding twice
    classifier = head_of(spec, tensors, head)
    dense = dense_of_folder(path, spec.dim)
    return Checkpoint(spec, tensors, path.resolve().name, path, values, classifier, tuple(config.unknown), dense)


def head_of(spec: ModelSpec, tensors: Mapping[str, Tensor], head: Mapping[str, Tensor]) -> ClassifierHead | None:
    if spec.classifier is None:
        return None
    return token_head(spec, tensors) if spec.classifier.tokens else build_head(spec, head)


def with_known_reranker(spec: ModelSpec, path: Path) -> ModelSpec:
    from penstock.text.pairs import is_qwen3_reranker

    if spec.classifier or spec.arch != "qwen3" or not is_qwen3_reranker(path):
        return spec
    vocab = ConfigReader(read_json(path / "tokenizer.json"), "tokenizer.json").table("model").table("vocab")
    tokens = tuple(vocab.count(word, 0) for word in ("yes", "no"))
    return replace(spec, classifier=ClassifierSpec(("LABEL_0",), "sigmoid", "last", tokens=tokens))


def unknown_line(unknown: Sequence[str]) -> str:
    return f"{CONFIG} has fields that this engine does not know: {', '.join(unknown)}"


def changed(values: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Applies KEY=VALUE changes: VALUE is JSON or else text, and dots in KEY enter nested tables."""
    for change in changes:
        key, equals, text = change.partition("=")
        if not (key and equals):
            raise ConfigError(f"--config takes KEY=VALUE; got {change!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        values = with_value(values, key.split("."), value)
    return values


def with_value(values: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    key, *rest = path
    inner = values.get(key)
    return values | {key: with_value(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def read_fields(config: ConfigReader) -> ModelSpec:
    """Reads the spec; afterwards `config.unknown` lists unrecognized fields."""
    named = config.strings("architectures")
    if len(named) == 1 and named[0] in CLASSIFIERS:
        spec = read_model(config.without(*LABEL_KEYS).having(architectures=[CLASSIFIERS[named[0]]]))
        classifier = read_labels(config, *head_of_family(spec))
        return replace(spec, classifier=classifier, tied=not spec.encoder, generates=False)
    if len(named) == 1 and named[0] in WITHOUT_HEAD:
        return without_head(read_model(config.having(architectures=[WITHOUT_HEAD[named[0]]])))
    return read_model(config)


def without_head(spec: ModelSpec) -> ModelSpec:
    """Returns the spec of a decoder without an output head, which only computes embeddings."""
    return replace(spec, tied=True, generates=False)


def head_of_family(spec: ModelSpec) -> tuple[str, str]:
    if not spec.encoder:
        return "last", ""
    return "cls", "gelu" if spec.arch == "modernbert" else "tanh"


def read_model(config: ConfigReader) -> ModelSpec:
    spec = family_of_hf(config).read_hf(config)
    config.note_unread(NEUTRAL, CHANGING)
    return spec


def read_safetensors_shards(folder: Path) -> dict[str, Tensor]:
    """Reads all safetensors files of a folder; returns tensors by file name."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise ModelNotFound(
                f"{folder} has neither {SINGLE} nor {INDEX}; other kinds of weight files are not supported"
            )
        return read_safetensors(folder / SINGLE)
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(is_file_name(file) for file in places.values()):
        raise MalformedFile(f"the weight_map of {INDEX} must map tensor names to file names in the same folder")
    shards = {file: read_safetensors(folder / file) for file in sorted(set(places.values()))}
    stored = {(name, file) for file, tensors in shards.items() for name in tensors}
    if odd := sorted(places.items() ^ stored):
        raise MalformedFile(f"{INDEX} and the files disagree about tensor {odd[0][0]!r}; fetch the model again")
    return {name: shards[file][name] for name, file in places.items()}


def is_file_name(file: Any) -> bool:
    return isinstance(file, str) and file == Path(file).name


def check_sizes(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    """Raises if the config states more layers than there are tensors, or widths far beyond all tensors. Some
    allocations depend on them before any tensor's shape is checked.
    """
    found = {int(match[1]) for name in tensors if (match := names.LAYER.match(name))}
    missing = next((layer for layer in range(spec.layers) if layer not in found), None)
    if missing is not None:
        raise MalformedFile(
            f"the model's config has {spec.layers} layers, and the checkpoint has no tensors of layer {missing}; it "
            "may be truncated or of another kind"
        )
    largest = max((max(tensor.shape, default=0) for tensor in tensors.values()), default=0)
    attentions = {spec.attn, *spec.layer_attn}
    widths = {
        "width of the model": spec.dim,
        "width of an MLP": max(spec.hidden, spec.shared_hidden, *spec.layer_hidden),
        "vocabulary": spec.vocab,
        "width of all query heads": max(a.q_width for a in attentions),
        "width of all KV heads": max(a.kv_width for a in attentions),
        "number of experts": spec.experts.count if spec.experts else 0,
        "width of an expert": max(spec.experts.hidden, spec.experts.width) if spec.experts else 0,
        "width of recurrent layers": spec.recurrence.width if spec.recurrence else 0,
    }
    for what, width in widths.items():
        if width > MOST_ABOVE * largest:
            raise MalformedFile(
                f"the model's config has a {what} of {width}, and the largest dimension of a tensor is {largest}"
            )


def check_heads(spec: ModelSpec) -> None:
    """Raises if the attention head counts do not divide evenly."""
    for a in {spec.attn, *spec.layer_attn}:
        if a.heads % a.kv_heads:
            raise MalformedFile(f"{a.heads} query heads cannot share {a.kv_heads} key and value heads evenly")
        if a.head_dim % 2:
            raise UnsupportedModel(f"head_dim is {a.head_dim}; it must be even, because rotary embeddings rotate pairs")


def check_experts(spec: ModelSpec) -> None:
    """Raises if the expert groups cannot supply the number of selected experts."""
    if spec.experts is None:
        return
    e = spec.experts
    if e.count % e.groups or e.top_k_groups > e.groups or e.top_k > e.top_k_groups * (e.count // e.groups):
        raise MalformedFile(
            f"{e.top_k} of {e.count} experts cannot be chosen from {e.top_k_groups} of {e.groups} equal groups"
        )


def check_biases(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    """Raises if biases in the file and in the config disagree. If the config is silent, a part must have a bias in all
    layers or in none.
    """
    found = {
        name for name, tensor in tensors.items() if tensor.role is Role.BIAS and name.removesuffix(BIAS) in tensors
    }
    if spec.biases is None:
        biased = {in_any_layer(name) for name in found}
        wanted = {f"{name}.bias" for name in tensors if in_any_layer(f"{name}.bias") in biased}
    else:
        wanted = {f"{name}.bias" for name in tensors if last_part(name) in spec.biases}
    if odd := sorted(wanted ^ found):
        raise MalformedFile(
            f"the model's config and its tensors disagree about biases: {odd[0]!r} is "
            f"{'missing' if odd[0] in wanted else 'not expected'}"
        )


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


def in_any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)
