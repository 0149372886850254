"""Where models lie on this machine.

<home>/models/<model>/         a fetched model's files, whole
<home>/records/<model>.json    its record, written last: a model without one is not there
<home>/parts/<model>/          a fetch under way, or what an interrupted one left
<home>/locks/<model>           held while a model is fetched or removed
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.errors import ConfigError, MalformedFile


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that is in the store."""

    name: str
    source: str
    path: Path
    size: int
    sha256: str  # empty for a folder
    fetched: str  # ISO 8601, UTC


@dataclass(frozen=True, slots=True)
class Place:
    """One model's corner of the store."""

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


def home() -> Path:
    """The store's folder: PENSTOCK_HOME, or `penstock` in the user's cache."""
    given = os.environ.get("PENSTOCK_HOME")
    try:
        return Path(given).expanduser().absolute() if given else _user_cache() / "penstock"
    except RuntimeError as error:
        raise ConfigError(f"no home folder is known for this user ({error}); set PENSTOCK_HOME") from error


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def write_record(place: Place, entry: Entry) -> None:
    fields = asdict(entry) | {"path": entry.path.relative_to(place.home).as_posix()}
    place.record.parent.mkdir(parents=True, exist_ok=True)
    draft = place.record.with_suffix(".draft")
    draft.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, place.record)


def read_record(record: Path) -> Entry | None:
    """The entry of a record, or None when there is no record or its files are not what it says."""
    try:
        fields = json.loads(record.read_text(encoding="utf-8"))
        entry = Entry(**fields | {"path": record.parent.parent / fields["path"]})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise MalformedFile(f"the store's record {record} is damaged ({error}); delete it and pull again") from error
    return entry if size_of(entry.path) == entry.size else None


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 when it is not there."""
    return sum(file_sizes(path))


def file_sizes(path: Path) -> list[int]:
    """Of a file, or of each in a folder; files may go while we look."""
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
    """Held by one process at a time; the system lets go of it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        while not _take(file.fileno()):
            waiting()
            time.sleep(0.1)
        yield


if sys.platform == "win32":
    import msvcrt

    def _take(fd: int) -> bool:
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _take(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
