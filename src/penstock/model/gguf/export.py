"""Converts a checkpoint to a GGUF file in another format: chooses the file's keys and tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, UnsupportedModel
from penstock.model import names
from penstock.model.config_reader import ConfigReader
from penstock.model.dequantize import dequantize
from penstock.model.gguf.metadata import check_family, config_keys
from penstock.model.gguf.shards import read_shards
from penstock.model.gguf.tensor_order import reorder_for_gguf
from penstock.model.gguf.writer import FORMAT_KINDS, PendingTensor, encoded, rows_at_once
from penstock.model.load import CONFIG, METADATA, Checkpoint, load_model, open_checkpoint, unknown_line
from penstock.model.quantize_choice import Encode, FormatChoice, Precision, choose, precision_of
from penstock.model.registry import family, family_of_gguf
from penstock.model.roles import BIAS, EXPERTS, Role
from penstock.model.spec import ModelSpec
from penstock.model.split_heads import split_kv_b
from penstock.model.tensor import FORMATS, PLAIN, Format, Tensor, flat, some_rows

FILE_TYPES = {  # general.file_type of a file with mostly this format
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18,
    "BF16": 32,
}  # fmt: skip
TARGETS = tuple(name.lower() for name in FILE_TYPES)
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "kv_a": ("latent", "k_rope")}
WRITTEN_SPLIT = {
    "glm4": ("qkv",),
    "phi2": ("qkv",),
}  # parts that files may fuse; they are written separately
PUBLISHED = ("MXFP4",)  # formats of published experts, which are kept
DROPPED = ("general.alignment", "split.")  # keys about the file itself
WITHOUT_SUFFIX = ("ssm_a", "ssm_d")  # tensors whose file names lack .weight or .bias
EXPERT = re.compile(r"experts\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Export:
    """Describes a GGUF file to be written."""

    keys: Mapping[str, bytes]
    tensors: tuple[PendingTensor, ...]
    notes: tuple[str, ...]


class Unpacked:
    """Discards everything: building a model with this backend checks all tensor shapes."""

    def pack_matrix(self, parts: Any, bias: Any) -> None: ...

    def pack_vector(self, tensor: Tensor) -> None: ...

    def pack_experts(self, up: Any, down: Any, choice_bias: Any) -> None: ...

    def pack_heads(self, tensor: Tensor) -> None: ...


class FileTensor(NamedTuple):
    """Describes one tensor of the file, built from one or more tensors of the checkpoint."""

    name: str  # in the file
    sources: tuple[Tensor, ...]
    stacked: bool = False  # along a new axis
    rotated: int = 0  # dimensions per head whose RoPE pairs become neighbours; 0: rows keep their order
    head_dim: int = 0
    plus: float = 0.0  # added to every value


class Destination(NamedTuple):
    """Places a tensor of the checkpoint in the file."""

    name: str  # canonical name of the file's tensor
    source: int  # index among its sources
    stacked: bool


def export(
    path: Path, to: str, encode: Encode, *, again: bool = False, changes: Sequence[str] = (), strict: bool = False
) -> Export:
    """Plans a GGUF file in format `to`, one of TARGETS. `again` also requantizes quantized weights; `changes` and
    `strict`: see `open_checkpoint`.
    """
    target = FORMATS[to.upper()]
    if path.is_dir() or changes:
        return from_folder(open_checkpoint(path, changes, strict), target, encode, again)
    return from_gguf(path, target, encode, again)


def from_gguf(path: Path, to: Format, encode: Encode, again: bool) -> Export:
    file = read_shards(path)
    naming = family_of_gguf(ConfigReader(file.metadata, METADATA)).GGUF
    keys = {key: file.metadata.stored(key) for key in file.metadata if not key.startswith(DROPPED)}
    keys["general.file_type"] = encoded(FILE_TYPES[to.name])
    tensors = {name: with_role(tensor, naming) for name, tensor in file.tensors.items()}
    choice = chosen(tensors, to, again)
    pending = [
        pending_tensor(FileTensor(name, (tensor,)), choice.formats.get(name, tensor.format), encode)
        for name, tensor in tensors.items()
    ]
    return Export(keys, tuple(pending), choice.notes)


def with_role(tensor: Tensor, naming: names.Naming) -> Tensor:
    return (
        tensor if naming.ignored.fullmatch(tensor.name) else tensor.with_role(names.identify(tensor.name, naming).role)
    )


def chosen(tensors: Mapping[str, Tensor], to: Format, again: bool) -> FormatChoice:
    """Chooses the tensors' formats; refuses to quantize twice unless `again`."""
    if not again:
        check_plain(tensors, to)
    return choose(tensors, to.name, again)


def check_plain(tensors: Mapping[str, Tensor], to: Format) -> None:
    """Raises if quantizable weights are already quantized, except for experts published that way."""
    quantized = {
        tensor.format.name
        for tensor in tensors.values()
        if precision_of(tensor) is not Precision.PLAIN
        and tensor.format.name not in PLAIN
        and not (tensor.role in EXPERTS and tensor.format.name in PUBLISHED)
    }
    if quantized:
        raise ConfigError(
            f"the weights are quantized already, in {', '.join(sorted(quantized))}: quantizing them to {to.name} adds "
            "a second rounding error to the first. Start from the original model, or use --again to do it anyway."
        )


def from_folder(checkpoint: Checkpoint, to: Format, encode: Encode, again: bool) -> Export:
    """Plans a GGUF file from a Hugging Face folder, with its tokenizer and chat template."""
    from penstock.text.gguf_export import text_keys  # slow to import; only folders need it

    if checkpoint.classifier and not checkpoint.spec.generates:
        raise UnsupportedModel("a model with a classification head cannot be written as GGUF yet: it would be lost")
    if checkpoint.dense:
        raise UnsupportedModel(
            "a model with dense layers after its pooling cannot be written as GGUF yet: use its folder"
        )
    spec, config = checkpoint.spec, ConfigReader(checkpoint.metadata, CONFIG)
    check_family(spec)
    load_model(checkpoint, Unpacked())
    parts = file_tensors(checkpoint)
    config_values, extra, found = config_keys(config, spec, {part.name: part.sources[0] for part in parts.values()})
    values: dict[str, Any] = {
        **config_values,
        "general.name": checkpoint.name,
        "general.file_type": FILE_TYPES[to.name],
        "general.quantization_version": 2,
        **text_keys(checkpoint.path, spec.vocab),
    }
    if spec.encoder:
        values["tokenizer.ggml.token_type_count"] = parts["types"].sources[0].shape[0] if "types" in parts else 1
    if found.attn.rope.interleaved and not spec.attn.rope.interleaved:
        parts = {name: interleaved(name, part, spec) for name, part in parts.items()}
    choice = chosen({name: part.sources[0] for name, part in parts.items()}, to, again)
    pending = [pending_tensor(FileTensor(name, (tensor,)), tensor.format, encode) for name, tensor in extra.items()]
    pending += [pending_tensor(part, format_of(name, part, choice), encode) for name, part in parts.items()]
    notes = (*choice.notes, *((unknown_line(checkpoint.unknown),) if checkpoint.unknown else ()))
    return Export({key: encoded(value) for key, value in values.items()}, tuple(pending), notes)


def file_tensors(checkpoint: Checkpoint) -> dict[str, FileTensor]:
    spec = checkpoint.spec
    naming = family(spec.arch).GGUF
    theirs = {ours: name for name, ours in (*naming.top.items(), *naming.parts.items())}
    fused = [name for name in FUSED if name in theirs and name not in WRITTEN_SPLIT.get(spec.arch, ())]
    whole = {part: name for name in fused for part in FUSED[name]}
    gathered: dict[Destination, dict[int, Tensor]] = {}
    for name, tensor in reorder_for_gguf(split_kv_b(checkpoint.tensors, spec), spec).items():
        goes_to = destination_of(name, whole)
        gathered.setdefault(goes_to._replace(source=0), {})[goes_to.source] = tensor
    parts = {}
    for goes_to, tensors in gathered.items():
        sources = tuple(tensors[source] for source in sorted(tensors))
        plus = spec.gain_offset if sources[0].role is Role.NORM else 0.0
        name = file_name(goes_to.name, theirs, spec.arch)
        parts[goes_to.name] = FileTensor(name, sources, goes_to.stacked, plus=plus)
    return parts


def split_name(name: str) -> tuple[str, str, str]:
    """Splits a canonical name: "layers.N." or "", the part, and ".bias" or ""."""
    stem, suffix = (name.removesuffix(BIAS), BIAS) if name.endswith(BIAS) else (name, "")
    layer = names.LAYER.match(stem)
    prefix = layer[0] if layer else ""
    return prefix, stem.removeprefix(prefix), suffix


def destination_of(name: str, whole: Mapping[str, str]) -> Destination:
    """Returns a tensor's place in the file; `whole` maps parts to their fused tensor."""
    layer, part, suffix = split_name(name)
    if match := EXPERT.fullmatch(part):
        return Destination(f"{layer}experts.{match[2]}{suffix}", int(match[1]), stacked=True)
    if part not in whole:
        return Destination(name, 0, stacked=False)
    return Destination(f"{layer}{whole[part]}{suffix}", FUSED[whole[part]].index(part), stacked=False)


def file_name(name: str, theirs: Mapping[str, str], arch: str) -> str:
    layer, part, suffix = split_name(name)
    if part not in theirs:
        raise UnsupportedModel(f"a GGUF file of {arch} has no tensor that could hold {name!r}")
    full = theirs[part]
    if not full.endswith((".bias", ".weight", *WITHOUT_SUFFIX)):
        full += suffix or ".weight"
    return f"blk.{layer.split('.')[1]}.{full}" if layer else full


def interleaved(name: str, part: FileTensor, spec: ModelSpec) -> FileTensor:
    if split_name(name)[1] not in ("q", "k"):
        return part
    rotated = max(2 * len(attn.rope.inv_freq) for attn in (spec.attn, *spec.layer_attn))
    return part._replace(rotated=rotated, head_dim=spec.attn.head_dim)


def format_of(name: str, part: FileTensor, choice: FormatChoice) -> Format:
    """Returns the chosen format. Tensors that are never quantized become F32, as readers expect, and formats that GGUF
    lacks become BF16.
    """
    if name in choice.formats:
        return choice.formats[name]
    if len(part.sources[0].shape) == 1 or precision_of(part.sources[0]) is Precision.PLAIN:
        return FORMATS["F32"]
    own = part.sources[0].format
    return own if own.name in FORMAT_KINDS else FORMATS["BF16"]


def pending_tensor(part: FileTensor, format: Format, encode: Encode) -> PendingTensor:
    rows, *width = part.sources[0].shape
    shape = (len(part.sources), rows) if part.stacked else (sum(tensor.shape[0] for tensor in part.sources),)
    return PendingTensor(part.name, format, (*shape, *width), partial(pieces, part, format, encode))


def pieces(part: FileTensor, format: Format, encode: Encode) -> Iterator[NDArray[np.uint8]]:
    for tensor in part.sources:
        ordered = reordered(tensor, part)
        matrix = replace(ordered, shape=(1, *ordered.shape)) if len(ordered.shape) == 1 else flat(ordered)
        for first, last in rows_at_once(*matrix.shape):
            yield encode(plus(some_rows(matrix, first, last), part.plus), format).data


def plus(tensor: Tensor, offset: float) -> Tensor:
    if not offset:
        return tensor
    values = dequantize(tensor) + np.float32(offset)
    return replace(tensor, format=FORMATS["F32"], source=values.reshape(-1).view(np.uint8), scales=None)


def reordered(tensor: Tensor, part: FileTensor) -> Tensor:
    """Returns q or k with each head's rows (i, i + rotated / 2) moved to (2i, 2i + 1)."""
    if not part.rotated:
        return tensor
    if tensor.scales is not None:
        raise UnsupportedModel(
            f"tensor {tensor.name!r} has scales of its own, so its rows cannot be reordered for a GGUF file; start "
            "from a checkpoint with plain weights"
        )
    order = np.arange(tensor.shape[0]).reshape(-1, part.head_dim)
    pairs = order[:, : part.rotated].reshape(len(order), 2, -1)
    order[:, : part.rotated] = pairs.swapaxes(1, 2).reshape(len(order), -1)
    return replace(tensor, source=tensor.data.reshape(tensor.shape[0], -1)[order.reshape(-1)].reshape(-1))
