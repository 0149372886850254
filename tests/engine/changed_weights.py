"""Makes other weights for the tiny models of these tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np


def change_weights(model: Path, folder: Path) -> Path:
    """Copies a model with the rows of every tensor in reverse, which every format allows."""
    shutil.copytree(model, folder)
    for file in folder.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        size = int.from_bytes(data[:8], "little")
        for name, about in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                first, last = (8 + size + at for at in about["data_offsets"])
                rows = np.frombuffer(bytes(data[first:last]), np.uint8).reshape(about["shape"][0], -1)
                data[first:last] = rows[::-1].tobytes()
        file.write_bytes(data)
    return folder


def change_config(folder: Path, **values: object) -> None:
    """Writes other values into a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
