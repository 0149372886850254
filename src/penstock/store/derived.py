"""Stores derived models: an uploaded file or another model, with its own name and settings (Ollama's Modelfile).

<home>/made/<digest of the name>.json    the record of a derived model. A name never becomes a path.
<home>/made/adapters/<digest>/           an adapter with uploaded files, as links to them
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.config import home
from penstock.errors import DownloadError, InvalidRequest, MalformedFile, ModelNotFound
from penstock.store.blobs import blob_path, delete_blob, delete_unused
from penstock.store.paths import locked
from penstock.store.refs import ALIASES
from penstock.system.files import make_private_file, make_private_folder

MAX_DERIVED = 1000
MAX_RECORD = 2**20  # bytes
MAX_NAME = 200
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,3}}(?::{_PART})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedModel:
    """Describes a model derived from the uploaded file `blob` or the model `base`. The other fields are defaults of its
    chats.
    """

    name: str
    base: str = ""
    path: str = ""  # the base's path, if it is not in the store
    blob: str = ""  # digest
    system: str = ""
    template: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    license: list[str] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)  # paths
    key: str = ""  # the API key or trusted proxy's tenant that owns it; empty: shared
    made: str = ""  # ISO 8601, UTC

    @property
    def digest(self) -> str:
        return hashlib.sha256(_to_json(self)).hexdigest()


def check_name(name: str) -> None:
    """Raises InvalidRequest if the name is not allowed."""
    scheme = name.partition(":")[0]
    if len(name) > MAX_NAME or not _NAME.fullmatch(name) or scheme in ("hf", "pypi") or name in ALIASES:
        raise InvalidRequest(
            f"{name[:MAX_NAME]!r} is not allowed as the name of a new model: use up to {MAX_NAME} letters, digits and "
            ". _ - with / between parts and : before a tag, and no name of a model that can be fetched",
            param="model",
        )


def derived_model(name: str) -> DerivedModel | None:
    return _read(_record(name))


def derived_models() -> list[DerivedModel]:
    found = (_read(record) for record in (home() / "made").glob("*.json"))
    return sorted((derived for derived in found if derived), key=lambda derived: derived.name)


def save_derived(derived: DerivedModel) -> None:
    check_name(derived.name)
    text = _to_json(replace(derived, made=datetime.now(UTC).isoformat(timespec="seconds")))
    if len(text) > MAX_RECORD:
        raise InvalidRequest(f"the model's settings take {len(text)} bytes; the limit is {MAX_RECORD}: shorten them")
    record = _record(derived.name)
    with _exclusive("create", derived.name):
        if not record.exists() and len(derived_models()) >= MAX_DERIVED:
            raise InvalidRequest(f"this server has {MAX_DERIVED} derived models, which is the limit: delete some")
        if derived.blob and not blob_path(derived.blob).exists():
            raise InvalidRequest(
                f"the file {derived.blob} is not in the store: upload it to /api/blobs/{derived.blob} first"
            )
        make_private_folder(record.parent)
        draft = record.with_suffix(".draft")
        make_private_file(draft)
        draft.write_bytes(text)
        os.replace(draft, record)


def delete_derived(name: str) -> int:
    """Deletes a derived model, and its file if no other uses it; returns the freed bytes."""
    with _exclusive("delete", name):
        derived = derived_model(name)
        if derived is None:
            raise ModelNotFound(f"there is no derived model called {name!r}")
        _record(name).unlink()
        if not derived.blob or any(other.blob == derived.blob for other in derived_models()):
            return 0
        return delete_blob(blob_path(derived.blob))


def delete_unused_blobs() -> None:
    """Deletes uploaded files without a derived model after a day."""
    with _exclusive("delete", "unused uploaded files"):
        models = derived_models()
        files = {derived.blob.removeprefix("sha256:") for derived in models}
        delete_unused(files | {name for derived in models for path in derived.adapters for name in _files_at(path)})


def adapter_of_blobs(files: Mapping[str, str]) -> list[str]:
    """Returns the paths of adapters made from uploads, given as digests by file name: GGUF files, or a PEFT folder of
    links.
    """
    for digest in files.values():
        if not blob_path(digest).exists():
            raise InvalidRequest(
                f"adapters: {digest} does not exist here: upload it to /api/blobs/{digest} first", param="adapters"
            )
    if not any(name.endswith(PEFT_FILES) for name in files):
        return [str(blob_path(digest)) for digest in files.values()]
    named = {Path(name).name: blob_path(digest) for name, digest in files.items()}
    if not set(PEFT_FILES) <= named.keys():
        raise InvalidRequest(f"adapters: a PEFT adapter has the files {' and '.join(PEFT_FILES)}", param="adapters")
    key = hashlib.sha256("".join(named[name].name for name in PEFT_FILES).encode()).hexdigest()
    folder = home() / "made" / "adapters" / key
    make_private_folder(folder)
    for name in PEFT_FILES:
        with suppress(FileExistsError):
            (folder / name).symlink_to(named[name])
    return [str(folder)]


def _files_at(path: str) -> list[str]:
    place = Path(path)
    return [each.resolve().name for each in place.iterdir()] if place.is_dir() else [place.name]


def _record(name: str) -> Path:
    return home() / "made" / f"{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()}.json"


def _to_json(derived: DerivedModel) -> bytes:
    return json.dumps(asdict(derived), indent=1).encode() + b"\n"


def _read(record: Path) -> DerivedModel | None:
    try:
        return DerivedModel(**json.loads(record.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError) as error:
        raise MalformedFile(f"the store's record {record} is damaged ({error}); delete it") from error


@contextmanager
def _exclusive(action: str, name: str) -> Iterator[None]:
    """Locks the derived models, so that one process at a time changes them."""
    try:
        with locked(home() / "locks" / "made"):
            yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DownloadError(f"could not {action} {name} in {home()}: {reason}") from error
