"""Counts and deletes the packed weights that engines have cached for models (backend/packed_cache.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

from penstock.config import packed_folder, packed_home
from penstock.store.paths import size_of


def packed_size() -> int:
    return size_of(packed_home())


def delete_packed(model: Path) -> int:
    """Deletes the packed weights of a model file or of all files in a folder; returns the freed bytes."""
    folders = [packed_folder(path) for path in (model, *model.rglob("*"))]
    freed = sum(map(size_of, folders))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return freed
