"""Models that were made here: an uploaded file, or another model under a name and with settings of its own.

<home>/made/<digest of the name>.json    a made model's record. A name never becomes a path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.errors import DownloadError, InvalidRequest, MalformedFile, ModelNotFound
from penstock.store.blobs import blob_path, forget_unused
from penstock.store.places import home, locked, size_of
from penstock.store.refs import ALIASES

MAX_MADE = 1000
MAX_RECORD = 2**20  # bytes
MAX_NAME = 200

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,3}}(?::{_PART})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """It stands for `blob`, or for the model called `base`; the rest is what chats with it begin from."""

    name: str
    base: str = ""
    path: str = ""  # of the base, where that is not in the store
    blob: str = ""  # a digest
    system: str = ""
    template: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    license: list[str] = field(default_factory=list)
    made: str = ""  # ISO 8601, UTC

    @property
    def has_settings(self) -> bool:
        return bool(self.system or self.template or self.parameters or self.messages)

    @property
    def digest(self) -> str:
        return hashlib.sha256(_written(self)).hexdigest()


def check_name(name: str) -> None:
    """Refuses what cannot be the name of a made model."""
    scheme = name.partition(":")[0]
    if len(name) > MAX_NAME or not _NAME.fullmatch(name) or scheme in ("hf", "pypi") or name in ALIASES:
        raise InvalidRequest(
            f"{name[:MAX_NAME]!r} cannot name a model of your own: write at most {MAX_NAME} letters, digits and . _ - "
            "with / between parts and : before a tag; names of models that can be fetched are taken",
            param="model",
        )


def made_called(name: str) -> Made | None:
    return _read(_record(name))


def all_made() -> list[Made]:
    found = (_read(record) for record in (home() / "made").glob("*.json"))
    return sorted((made for made in found if made), key=lambda made: made.name)


def make(made: Made) -> None:
    """Enters the model; one of the same name is replaced."""
    check_name(made.name)
    text = _written(Made(**asdict(made) | {"made": datetime.now(UTC).isoformat(timespec="seconds")}))
    if len(text) > MAX_RECORD:
        raise InvalidRequest(f"the model's settings take {len(text)} bytes; at most {MAX_RECORD} are kept")
    record = _record(made.name)
    with _changing("make", made.name):
        if not record.exists() and len(all_made()) >= MAX_MADE:
            raise InvalidRequest(f"{MAX_MADE} models were made here, which is the most: delete some")
        if made.blob and not blob_path(made.blob).exists():
            raise InvalidRequest(f"the file {made.blob} is not here: upload it to /api/blobs/{made.blob} first")
        record.parent.mkdir(parents=True, exist_ok=True)
        draft = record.with_suffix(".draft")
        draft.write_bytes(text)
        os.replace(draft, record)


def unmake(name: str) -> int:
    """Deletes a made model, and its file when no other is made of it; returns the bytes that this freed."""
    with _changing("delete", name):
        made = made_called(name)
        if made is None:
            raise ModelNotFound(f"no model called {name!r} was made here")
        _record(name).unlink()
        if not made.blob or any(other.blob == made.blob for other in all_made()):
            return 0
        freed = size_of(blob_path(made.blob))
        blob_path(made.blob).unlink(missing_ok=True)
        return freed


def forget_unused_blobs() -> None:
    with _changing("look for", "files that no model is made of"):
        forget_unused({made.blob.removeprefix("sha256:") for made in all_made()})


def _record(name: str) -> Path:
    return home() / "made" / f"{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()}.json"


def _written(made: Made) -> bytes:
    return json.dumps(asdict(made), indent=1).encode() + b"\n"


def _read(record: Path) -> Made | None:
    try:
        return Made(**json.loads(record.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError) as error:
        raise MalformedFile(f"the store's record {record} is damaged ({error}); delete it") from error


@contextmanager
def _changing(doing: str, name: str) -> Iterator[None]:
    """One process at a time."""
    try:
        with locked(home() / "locks" / "made"):
            yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DownloadError(f"could not {doing} {name} in {home()}: {reason}") from error
