"""Reads safetensors files: a length, a JSON header, then the bytes of every tensor.

It replaces the safetensors package, because tensors must be views of the mapped file, including BF16.
"""

from __future__ import annotations

import math
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.open_files import MAX_JSON, map_file, parse_json
from penstock.model.tensor import FORMATS, FP8, INTEGERS, Tensor

SUPPORTED = {name: FORMATS[name] for name in ("F32", "F16", "BF16")} | FP8 | INTEGERS


def read_safetensors(path: Path) -> dict[str, Tensor]:
    data: NDArray[np.uint8] = np.frombuffer(map_file(path), np.uint8)
    size = int.from_bytes(data[:8].tobytes(), "little")
    if size > min(len(data) - 8, MAX_JSON):
        raise MalformedFile(f"{path.name} claims a header of {size} bytes and has {len(data)}; fetch it again")
    header = parse_json(data[8 : 8 + size].tobytes(), f"the header of {path.name}")
    header.pop("__metadata__", None)
    return {name: cut_tensor(name, entry, data[8 + size :]) for name, entry in header.items()}


def cut_tensor(name: str, entry: Any, data: NDArray[np.uint8]) -> Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            raise MalformedFile(f"tensor {name!r} has a malformed entry in the header: {short(entry)}")
    if dtype not in SUPPORTED:
        raise UnsupportedModel(f"tensor {name!r} is stored as {dtype}; supported: {', '.join(SUPPORTED)}")
    if not all(type(dim) is int and dim > 0 for dim in shape):
        raise MalformedFile(f"tensor {name!r} has the shape {shape}; dimensions are whole numbers above 0")
    if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * SUPPORTED[dtype].bytes:
        raise MalformedFile(
            f"tensor {name!r} of shape {shape} in {dtype} claims bytes {start} to {end} of {len(data)}; fetch it again"
        )
    return Tensor(name, SUPPORTED[dtype], tuple(shape), data[start:end])
