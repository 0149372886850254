"""Writes a model with an adapter merged into its weights, as a GGUF file or a folder like the original."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import AdapterError
from penstock.model import names
from penstock.model.adapter_files import AdapterBase, LoraAdapter, merged, read_adapter
from penstock.model.dequantize import dequantize
from penstock.model.gguf.export import DROPPED, Export, FileTensor, Unpacked, pending_tensor
from penstock.model.gguf.shards import read_shards
from penstock.model.gguf.writer import replacing
from penstock.model.load import INDEX, SINGLE, load_placed, open_checkpoint, read_safetensors_shards
from penstock.model.low_rank import Floats
from penstock.model.quantize_choice import Encode
from penstock.model.registry import family
from penstock.model.split_fused import split_fused
from penstock.model.tensor import FORMATS, PLAIN, Tensor, transposed

WEIGHT_FILES = (".safetensors", ".gguf", ".bin", ".pth", ".pt")  # files of a folder that are not copied


class Merge(NamedTuple):
    """Holds an adapter, its extra scale, and the model it fits."""

    adapter: LoraAdapter
    scale: float
    base: AdapterBase
    naming: names.Naming


def open_merge(model: Path, adapter: Path, scale: float) -> Merge:
    """Opens a model and an adapter; raises AdapterError if they do not fit."""
    checkpoint = open_checkpoint(model)
    _, placements = load_placed(checkpoint, Unpacked())
    base, kind = AdapterBase.of(checkpoint, placements), family(checkpoint.spec.arch)
    return Merge(read_adapter(adapter, base), scale, base, kind.GGUF if base.gguf else kind.HUGGING_FACE)


def merge_gguf(path: Path, merge: Merge, encode: Encode) -> Export:
    """Plans a copy of a GGUF file with merged weights. Changed quantized weights become Q8_0, because a coarser format
    would round most updates away.
    """
    file = read_shards(path)
    keys = {key: file.metadata.stored(key) for key in file.metadata if not key.startswith(DROPPED)}
    pending, were = [], set()
    for name, tensor, changed in merged_tensors(file.tensors, merge):
        format = file.tensors[name].format
        if changed and format.name not in PLAIN:
            were.add(format.name)
            format = FORMATS["Q8_0"]
        pending.append(pending_tensor(FileTensor(name, (tensor,)), format, encode))
    line = f"merged weights are Q8_0 now, and were {', '.join(sorted(were))}: fewer bits would lose the update"
    return Export(keys, tuple(pending), (line,) if were else ())


def merge_folder(path: Path, merge: Merge, encode: Encode, out: Path) -> None:
    """Writes a copy of a folder with the merged weights in one file. Tensors keep their formats."""
    tensors = read_safetensors_shards(path)
    found = {
        name: encode(tensor, tensors[name].format) if changed else tensor
        for name, tensor, changed in merged_tensors(tensors, merge)
    }
    out.mkdir(parents=True)
    for file in path.iterdir():
        if file.is_file() and file.name != INDEX and file.suffix not in WEIGHT_FILES:
            shutil.copy2(file, out / file.name)
    write_safetensors(out / SINGLE, found)


def merged_tensors(tensors: Mapping[str, Tensor], merge: Merge) -> Iterator[tuple[str, Tensor, bool]]:
    """Yields each tensor by file name and whether the adapter changed it; changed ones are F32. Raises AdapterError if
    the file stores a changed weight in another form.
    """
    left = set(merge.adapter.matrices)
    for name, tensor in tensors.items():
        parts = parts_of(name, tensor, merge)
        changed = parts.keys() & left
        left -= changed
        yield name, (joined(name, tensor, parts, merge) if changed else tensor), bool(changed)
    if left:
        raise AdapterError(f"{min(left)!r} is stored in a form that nothing can be merged into: use the original model")


def parts_of(name: str, tensor: Tensor, merge: Merge) -> dict[str, Tensor]:
    """Returns the weights in a file's tensor, by canonical name; empty for tensors that are not weights."""
    if merge.naming.ignored.fullmatch(name) or names.look_up(name, merge.naming.top) is None:
        match = merge.naming.layer.fullmatch(name)
        if match is None or names.look_up(names.EXPERT.sub("*", match[2]), merge.naming.parts) is None:
            return {}
    identity = names.identify(name, merge.naming)
    if len(tensor.shape) != 2 or "experts" in identity.part:
        return {}
    usual = transposed(tensor) if identity.part in merge.naming.transposed else tensor
    return split_fused({identity.name: usual.with_role(identity.role)}, merge.base.spec)


def joined(name: str, tensor: Tensor, parts: Mapping[str, Tensor], merge: Merge) -> Tensor:
    identity = names.identify(name, merge.naming)
    if "grouped_qkv" in identity.part:
        raise AdapterError(f"tensor {name!r} holds q, k and v head by head: merging into it is not supported")
    values = np.concatenate([changed_part(part, piece, merge) for part, piece in parts.items()])
    if identity.part in merge.naming.transposed:
        values = values.T
    data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    return replace(tensor, format=FORMATS["F32"], source=data, scales=None)


def changed_part(name: str, part: Tensor, merge: Merge) -> Floats:
    matrix = merge.adapter.matrices.get(name)
    return dequantize(part) if matrix is None else merged(part, matrix, merge.scale)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.format.name,
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.size],
        }
        start += tensor.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.data).data)
