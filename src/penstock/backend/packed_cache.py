"""Says where the packed weights of a model are cached, what they depend on, and which files make room for others.

<home>/packed/<model>/<options>.packed  packed weights: backend/cpu/packed_file.py
<home>/packed/<model>/<options>.part    one that is being written, or what an interrupted write left
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

from penstock import __version__
from penstock.backend.devices import device_kind
from penstock.config import MTP, Config, packed_folder, packed_home
from penstock.errors import ConfigError
from penstock.model.load import Checkpoint
from penstock.system.files import try_lock

LAYOUT = 2  # a change to the layout of any packed weight needs another number
SUFFIX = ".packed"
FREE = 1 << 30  # bytes that are left free on the disk


class PackedCache(NamedTuple):
    """Names the file for one model's packed weights."""

    path: Path
    key: str  # what the weights depend on
    source: Path  # the model
    limit: int  # bytes that all files may take together


def packed_caches_of(config: Config, target: Checkpoint, draft: Checkpoint | None) -> list[PackedCache | None]:
    """Returns the caches of a target's weights and of its draft model's or head's. A draft model has the same file
    when it is served by itself."""
    if draft is None:
        return [packed_cache_of(config, target)]
    own = config if draft.spec.arch == MTP else replace(config, config=())  # changes only the target
    return [packed_cache_of(config, target), packed_cache_of(own, draft)]


def packed_cache_of(config: Config, checkpoint: Checkpoint) -> PackedCache | None:
    """Returns where the weights of a checkpoint are cached; None if they are not to be. The config's defaults are
    resolved."""
    if not config.packed_cache or not device_kind(config.device).cached_weights:
        return None
    if not hasattr(os, "pread"):  # Windows, where no file is renamed while it is open, and locked
        return None
    head = (MTP,) if checkpoint.spec.arch == MTP else checkpoint.head_files  # it shares its target's files
    options = json.dumps([config.quantize, *config.config, *map(str, head)])
    try:
        key = json.dumps([LAYOUT, __version__, options, [identity(file) for file in checkpoint.files]])
        folder = packed_folder(checkpoint.path)
    except (OSError, ConfigError):  # such as a user without a home folder
        return None
    name = blake2b(options.encode(), digest_size=8).hexdigest()
    return PackedCache(folder / f"{name}{SUFFIX}", key, checkpoint.path, config.packed_cache)


def identity(file: Path) -> tuple[str, int, int, int, int]:
    """Identifies a file's contents without reading them. The change time of an inode cannot be set back, so this is as
    reliable as a digest."""
    found = file.stat()
    return file.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def make_room(cache: PackedCache, size: int) -> None:
    """Deletes the files that were not used for the longest time, and what interrupted writes left, so that `size` more
    bytes are within the limit. Raises OSError if there cannot be room."""
    if size > cache.limit:
        raise OSError(f"{size:,} bytes are beyond the limit of {cache.limit:,}")
    packed_home().mkdir(parents=True, exist_ok=True)
    files = sorted(found for found in packed_files() if found.path != cache.path)
    total = size + sum(file.size for file in files)
    for file in files:
        if total <= cache.limit:
            break
        total -= file.size
        delete(file.path)
    for part in packed_home().glob("*/*.part"):
        with suppress(OSError), locked(part):
            delete(part)
    if size + FREE > shutil.disk_usage(packed_home()).free:
        raise OSError(f"the disk of {packed_home()} has no room for {size:,} bytes")


class StoredFile(NamedTuple):
    """Describes a file of packed weights; those that were not used for the longest time are the smallest."""

    used: float
    path: Path
    size: int


def packed_files() -> Iterator[StoredFile]:
    for path in packed_home().glob(f"*/*{SUFFIX}"):
        with suppress(FileNotFoundError):  # another process may delete it
            found = path.stat()
            yield StoredFile(found.st_mtime, path, found.st_size)


def delete(file: Path) -> None:
    file.unlink(missing_ok=True)
    with suppress(OSError):
        file.parent.rmdir()


@contextmanager
def locked(part: Path) -> Iterator[BinaryIO]:
    """Opens a part that nobody else writes; raises OSError if somebody does. Closing it unlocks it."""
    with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
        if not try_lock(file.fileno()):
            raise BlockingIOError(f"{part} is written by another process")
        if not os.path.samestat(os.fstat(file.fileno()), part.stat()):  # another writer has just renamed it
            raise FileExistsError(f"{part} was written by another process meanwhile")
        yield file
