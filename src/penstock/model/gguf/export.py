"""A checkpoint as a GGUF file in another format: which keys and which tensors it gets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, UnsupportedModel
from penstock.model import names
from penstock.model.config_reader import Fields
from penstock.model.dequantize import dequantize
from penstock.model.families.mla import apart
from penstock.model.gguf.metadata import config_keys
from penstock.model.gguf.shards import read_parts
from penstock.model.gguf.tensor_order import laid_out
from penstock.model.gguf.writer import FORMAT_KINDS, Sheet, encoded, rows_at_once
from penstock.model.load import CONFIG, METADATA, Checkpoint, load_model, open_checkpoint
from penstock.model.recode import PARTS, Choice, Encode, choose
from penstock.model.registry import family, family_of_gguf
from penstock.model.spec import ModelSpec
from penstock.model.tensor import FORMATS, PLAIN, Format, Tensor, flat, some_rows

FILE_TYPES = {  # what general.file_type calls a file most of whose weights are in this format
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18,
    "BF16": 32,
}  # fmt: skip
TARGETS = tuple(name.lower() for name in FILE_TYPES)
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "kv_a": ("latent", "turned")}
APART = {"glm4": ("qkv",)}  # what a family's files may have in one tensor, and are written without
PUBLISHED = ("MXFP4",)  # what experts come in where nothing finer exists: they stay so, beside others that change
DROPPED = ("general.alignment", "split.")  # keys about the file
BARE = ("ssm_a",)  # what files have without a role in its name
EXPERT = re.compile(r"(.*\bexperts\.)(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Export:
    keys: Mapping[str, bytes]
    sheets: tuple[Sheet, ...]
    notes: tuple[str, ...]


class Unpacked:
    """Keeps nothing of what it is given: the shapes of a model that is made of it were checked, and that is all."""

    def pack_matrix(self, parts: Any, bias: Any) -> None: ...

    def pack_vector(self, tensor: Tensor) -> None: ...

    def pack_experts(self, up: Any, down: Any, choice_bias: Any) -> None: ...

    def pack_heads(self, tensor: Tensor) -> None: ...


class Part(NamedTuple):
    """One tensor, or several that become one, as a reader of the file expects them."""

    name: str  # of the file
    tensors: tuple[Tensor, ...]
    stacked: bool = False  # along an axis of their own
    turned: int = 0  # dimensions of each head whose pairs are to lie side by side
    head_dim: int = 0
    plus: float = 0.0  # what is added to every value


def export(path: Path, to: str, encode: Encode, again: bool = False) -> Export:
    """`to`: one of TARGETS. `again`: quantizes what is quantized already."""
    target = FORMATS[to.upper()]
    if path.is_dir():
        return from_folder(open_checkpoint(path), target, encode, again)
    return from_gguf(path, target, encode, again)


def from_gguf(path: Path, to: Format, encode: Encode, again: bool) -> Export:
    """Its keys stay as they are, but for the one that tells the format."""
    file = read_parts(path)
    naming = family_of_gguf(Fields(file.metadata, METADATA)).GGUF
    keys = {key: file.metadata.stored(key) for key in file.metadata if not key.startswith(DROPPED)}
    keys["general.file_type"] = encoded(FILE_TYPES[to.name])
    weights = {name: canonical(name, naming) for name in file.tensors}
    if not again:
        check_plain({weights[name]: tensor for name, tensor in file.tensors.items()}, to)
    choice = choose({weights[name]: tensor for name, tensor in file.tensors.items()}, to.name, again)
    sheets = [
        sheet_of(Part(name, (tensor,)), choice.formats.get(weights[name], tensor.format), encode)
        for name, tensor in file.tensors.items()
    ]
    return Export(keys, tuple(sheets), choice.notes)


def check_plain(tensors: Mapping[str, Tensor], to: Format) -> None:
    weights = {name: tensor.format.name for name, tensor in tensors.items() if name.rpartition(".")[2] in PARTS}
    coded = {format for name, format in weights.items() if not (".experts." in name and format in PUBLISHED)} - {*PLAIN}
    if coded:
        raise ConfigError(
            f"weights are quantized already, in {', '.join(sorted(coded))}: to make them {to.name} adds a second "
            "rounding to the first, worse than starting from the original; --again does it all the same"
        )


def canonical(name: str, naming: names.Naming) -> str:
    return name if naming.ignored.fullmatch(name) else names.canonical_name(name, naming)


def from_folder(checkpoint: Checkpoint, to: Format, encode: Encode, again: bool) -> Export:
    from penstock.text.gguf_export import text_keys  # slow to import, and GGUF files need none of it

    spec, config = checkpoint.spec, Fields(checkpoint.metadata, CONFIG)
    load_model(checkpoint, Unpacked())
    parts = parts_of(checkpoint)
    config_values, extra, found = config_keys(config, spec, {part.name: part.tensors[0] for part in parts.values()})
    values: dict[str, Any] = {
        **config_values,
        "general.name": checkpoint.name,
        "general.file_type": FILE_TYPES[to.name],
        "general.quantization_version": 2,
        **text_keys(checkpoint.path, spec.vocab),
    }
    if "types" in parts:
        values["tokenizer.ggml.token_type_count"] = parts["types"].tensors[0].shape[0]
    if found.attn.rope.interleaved and not spec.attn.rope.interleaved:
        parts = {name: interleaved(name, part, spec) for name, part in parts.items()}
    firsts = {name: part.tensors[0] for name, part in parts.items()}
    if not again:
        check_plain(firsts, to)
    choice = choose(firsts, to.name, again)
    sheets = [sheet_of(Part(name, (tensor,)), tensor.format, encode) for name, tensor in extra.items()]
    sheets += [sheet_of(part, format_of(name, part, choice), encode) for name, part in parts.items()]
    return Export({key: encoded(value) for key, value in values.items()}, tuple(sheets), choice.notes)


def parts_of(checkpoint: Checkpoint) -> dict[str, Part]:
    """What the file will hold, by canonical names: what its family has in one tensor is put together."""
    spec = checkpoint.spec
    naming = family(spec.arch).GGUF
    theirs = {ours: name for name, ours in (*naming.top.items(), *naming.parts.items())}
    fused = [name for name in FUSED if name in theirs and name not in APART.get(spec.arch, ())]
    whole = {part: name for name in fused for part in FUSED[name]}
    gathered: dict[str, dict[int, Tensor]] = {}
    for name, tensor in laid_out(apart(checkpoint.tensors, spec), spec).items():
        group, place = place_of(name, whole)
        gathered.setdefault(group, {})[place] = tensor
    parts = {}
    for name, tensors in gathered.items():
        plus = spec.gain_offset if name.endswith("norm") and not name.endswith(".delta_norm") else 0.0
        inner = tuple(tensors[place] for place in sorted(tensors))
        parts[name] = Part(file_name(name, theirs, spec.arch), inner, ".experts." in name, plus=plus)
    return parts


def place_of(name: str, whole: Mapping[str, str]) -> tuple[str, int]:
    """The tensor that a part belongs to, and its place in it."""
    if match := EXPERT.fullmatch(name):
        return match[1] + match[3], int(match[2])
    stem, role = (name.removesuffix(".bias"), ".bias") if name.endswith(".bias") else (name, "")
    prefix, dot, part = stem.rpartition(".")
    if part not in whole or prefix.endswith("shared"):
        return name, 0
    return f"{prefix}{dot}{whole[part]}{role}", FUSED[whole[part]].index(part)


def file_name(name: str, theirs: Mapping[str, str], arch: str) -> str:
    stem, role = (name.removesuffix(".bias"), "bias") if name.endswith(".bias") else (name, "weight")
    layer = names.LAYER.match(stem)
    part = stem[layer.end() :] if layer else stem
    if part not in theirs:
        raise UnsupportedModel(f"a GGUF file of {arch} has no place for {name!r}")
    with_role = theirs[part] if theirs[part].endswith((".bias", ".weight", *BARE)) else f"{theirs[part]}.{role}"
    return f"blk.{layer[1]}.{with_role}" if layer else with_role


def interleaved(name: str, part: Part, spec: ModelSpec) -> Part:
    if name.removesuffix(".bias").rpartition(".")[2] not in ("q", "k"):
        return part
    turned = max(2 * len(attn.rope.inv_freq) for attn in (spec.attn, *spec.layer_attn))
    return part._replace(turned=turned, head_dim=spec.attn.head_dim)


def format_of(name: str, part: Part, choice: Choice) -> Format:
    """What is no weight of a product becomes F32, as readers expect; formats that GGUF does not have, BF16."""
    if name in choice.formats:
        return choice.formats[name]
    if len(part.tensors[0].shape) == 1 or name.rpartition(".")[2] not in PARTS:
        return FORMATS["F32"]
    own = part.tensors[0].format
    return own if own.name in FORMAT_KINDS else FORMATS["BF16"]


def sheet_of(part: Part, format: Format, encode: Encode) -> Sheet:
    rows, *width = part.tensors[0].shape
    shape = (len(part.tensors), rows) if part.stacked else (sum(tensor.shape[0] for tensor in part.tensors),)
    return Sheet(part.name, format, (*shape, *width), partial(pieces, part, format, encode))


def pieces(part: Part, format: Format, encode: Encode) -> Iterator[NDArray[np.uint8]]:
    for tensor in part.tensors:
        turned = reordered(tensor, part)
        matrix = replace(turned, shape=(1, *turned.shape)) if len(turned.shape) == 1 else flat(turned)
        for first, last in rows_at_once(*matrix.shape):
            some = plus(some_rows(matrix, first, last), part.plus)
            yield encode(some, format).data


def plus(tensor: Tensor, offset: float) -> Tensor:
    if not offset:
        return tensor
    values = dequantize(tensor) + np.float32(offset)
    return Tensor(tensor.name, FORMATS["F32"], tensor.shape, values.reshape(-1).view(np.uint8))


def reordered(tensor: Tensor, part: Part) -> Tensor:
    """Rows of q and k where a file turns neighbours: the pair (i, i + turned / 2) of a head becomes (2i, 2i + 1)."""
    if not part.turned:
        return tensor
    order = np.arange(tensor.shape[0]).reshape(-1, part.head_dim)
    order[:, : part.turned] = order[:, : part.turned].reshape(len(order), 2, -1).swapaxes(1, 2).reshape(len(order), -1)
    if tensor.scales is not None:
        raise UnsupportedModel(f"tensor {tensor.name!r} has scales of its own, and its rows would have to move")
    return replace(tensor, source=tensor.data.reshape(tensor.shape[0], -1)[order.reshape(-1)].reshape(-1))
