"""Checkpoints to be damaged: the goldens, written again with something changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock.model.gguf.reader import read_gguf
from penstock.model.safetensors import read_safetensors
from penstock.model.tensor import FORMATS, Tensor

GOLDENS = Path(__file__).parent / "goldens"
Edit = Callable[[dict[str, Any]], None]


def unchanged(_: dict[str, Any]) -> None: ...


@pytest.fixture(scope="session")
def goldens() -> Path:
    return GOLDENS


@pytest.fixture
def floats() -> Callable[..., Tensor]:
    return lambda *shape: Tensor("made up", FORMATS["F32"], shape, np.ones(prod(shape), np.float32).view(np.uint8))


@pytest.fixture
def folder_with(tmp_path: Path) -> Callable[..., Path]:
    """A golden's folder, its config and tensors passed through functions that change them in place."""

    def make(golden: str, config: Edit = unchanged, tensors: Edit = unchanged) -> Path:
        folder = tmp_path / golden
        shutil.copytree(GOLDENS / golden, folder)
        values = json.loads((folder / "config.json").read_text())
        config(values)
        (folder / "config.json").write_text(json.dumps(values))
        if (folder / "model.safetensors").exists():
            stored = read_safetensors(GOLDENS / golden / "model.safetensors")
            tensors(stored)
            write_safetensors(folder / "model.safetensors", stored)
        return folder

    return make


@pytest.fixture
def gguf_with(tmp_path: Path) -> Callable[..., Path]:
    """A golden's GGUF file, its metadata and tensors passed through functions that change them in place."""

    def make(golden: str, metadata: Edit = unchanged, tensors: Edit = unchanged) -> Path:
        file = read_gguf(GOLDENS / golden / "model.gguf")
        values = dict(file.metadata)
        metadata(values)
        tensors(file.tensors)
        write_gguf(tmp_path / "model.gguf", values, file.tensors)
        return tmp_path / "model.gguf"

    return make


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + len(tensor.data)
        header[name] = {"dtype": tensor.format.name, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    path.unlink(missing_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t.data.tobytes() for t in tensors.values()))


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if key != "general.architecture":
            add[type(value)](key, value)
    for name, tensor in tensors.items():
        rows = tensor.data.reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[tensor.format.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
