"""Defines the store's paths on this machine.

<home>/models/<model>/         the files of a fetched model, complete
<home>/records/<model>.json    its record, written last: a model without one is not in the store
<home>/parts/<model>/          a download in progress or interrupted
<home>/packed/<model file>/    its packed weights, which engines write and can recreate
<home>/locks/<model>           locked while a model is fetched or removed
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path

from penstock.config import packed_folder, packed_home
from penstock.errors import DownloadError, MalformedFile
from penstock.system.files import try_lock

SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")  # a model split over several files
_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes a model in the store."""

    name: str
    source: str
    path: Path
    size: int
    sha256: str  # empty for a folder
    fetched: str  # ISO 8601, UTC
    quantize: str = ""  # the --quantize that it needs to fit in this machine's memory


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """Lists the files and folders of one model in the store."""

    home: Path
    name: str

    @property
    def folder(self) -> Path:
        return self.home / "models" / self._slug

    @property
    def part(self) -> Path:
        return self.home / "parts" / self._slug

    @property
    def record(self) -> Path:
        return self.home / "records" / f"{self._slug}.json"

    @property
    def lock(self) -> Path:
        return self.home / "locks" / self._slug

    @property
    def _slug(self) -> str:
        return self.name.replace(":", "--").replace("/", "--")


def write_record(paths: ModelPaths, entry: Entry) -> None:
    fields = asdict(entry) | {"path": entry.path.relative_to(paths.home).as_posix()}
    paths.record.parent.mkdir(parents=True, exist_ok=True)
    draft = paths.record.with_suffix(".draft")
    draft.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, paths.record)


def read_record(record: Path) -> Entry | None:
    """Returns a record's entry; None if it is missing or the model's size differs from it."""
    try:
        fields = json.loads(record.read_text(encoding="utf-8"))
        entry = Entry(**fields | {"path": record.parent.parent / fields["path"]})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise MalformedFile(f"the store's record {record} is damaged ({error}): delete it and pull again") from error
    return entry if size_of(entry.path) == entry.size else None


def size_of(path: Path) -> int:
    """Returns the bytes of a file with its shards, or of a folder; 0 if it does not exist."""
    shard = SHARD.fullmatch(path.name)
    files = path.parent.glob(f"{escape(shard[1])}-*-of-{shard[2]}.gguf") if shard else [path]
    return sum(size for file in files for size in file_sizes(file))


def check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DownloadError(f"the disk of {folder} is full: {needed:,} bytes are needed and {free:,} are free")


def file_sizes(path: Path) -> list[int]:
    """Returns the size of a file, or of each file in a folder. Files that vanish meanwhile are left out."""
    try:
        if path.is_dir():
            return [size for child in path.iterdir() for size in file_sizes(child)]
        return [path.stat().st_size]
    except FileNotFoundError:
        return []


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Locks a file; the system releases the lock if the holder dies. Calls `waiting` while another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        while not try_lock(file.fileno()):
            waiting()
            time.sleep(0.1)
        yield


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the GGUF models among some files: the first file of each, and all its shards in order. Image encoders and
    importance matrices are not models.
    """
    files = sorted(name for name in names if name.endswith(".gguf") and not _BESIDE.search(name.rpartition("/")[2]))
    models: dict[str, list[str]] = {}
    for name in files:
        first = next((first for first in models if are_shards(first, name)), name)
        models.setdefault(first, []).append(name)
    return models


def are_shards(name: str, other: str) -> bool:
    """Returns True if two files are shards of one GGUF model, such as `model-00001-of-00003.gguf`."""
    one, another = SHARD.fullmatch(name), SHARD.fullmatch(other)
    return one is not None and another is not None and one.groups() == another.groups()


def packed_size() -> int:
    return size_of(packed_home())


def delete_packed(model: Path) -> int:
    """Deletes the packed weights of a model file or of all files in a folder; returns the freed bytes."""
    folders = [packed_folder(path) for path in (model, *model.rglob("*"))]
    freed = sum(map(size_of, folders))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return freed
