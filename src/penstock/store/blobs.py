"""Stores uploaded files, each named by its SHA-256.

<home>/blobs/<sha256>           a file, complete and verified
<home>/blobs/<sha256>.<…>.part  an upload in progress or interrupted
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.config import home
from penstock.errors import DownloadError, InvalidRequest
from penstock.store.paths import delete_packed, size_of
from penstock.system.files import make_private_file, make_private_folder

MAX_BYTES = 2**38  # per file
MAX_FILES = 64
FREE = 2**30  # disk space that uploads leave free
UNUSED = 24 * 3600.0  # seconds; files without a derived model are kept this long


def blob_path(digest: str) -> Path:
    """Returns the path of a digest such as `sha256:<64 hex digits>`, whether it exists or not."""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise InvalidRequest(
            f"{digest[:80]!r} is not a digest: write sha256: and 64 hexadecimal digits", param="digest"
        )
    return _folder() / digest.removeprefix("sha256:")


def delete_unused(used: Collection[str]) -> None:
    """Deletes files older than UNUSED whose SHA-256 is not in `used`."""
    before = time.time() - UNUSED
    for file in _files():
        if file.name not in used and file.stat().st_mtime < before:
            delete_blob(file)


def delete_blob(file: Path) -> int:
    """Deletes a file and its packed weights; returns the freed bytes."""
    freed = size_of(file) + delete_packed(file)
    file.unlink(missing_ok=True)
    return freed


class Upload:
    """Receives one file. `keep` verifies its digest and adds it to the store; an unfinished or corrupt upload is
    deleted.
    """

    def __init__(self, digest: str, size: int) -> None:
        """Opens a file of `size` bytes; 0: unknown."""
        self._target = blob_path(digest)
        make_private_folder(self._target.parent)
        if len(_files()) >= MAX_FILES:
            raise InvalidRequest(
                f"the store has {MAX_FILES} uploaded files, which is the limit: delete models that use uploaded files"
            )
        self._size = 0
        self._check_room(size)
        self._hash = hashlib.sha256()
        self._part = self._target.with_name(f"{self._target.name}.{os.urandom(8).hex()}.part")
        make_private_file(self._part)
        self._file = self._part.open("wb", buffering=0)

    def write(self, chunk: bytes) -> None:
        self._check_room(len(chunk))
        self._size += len(chunk)
        self._hash.update(chunk)
        try:
            self._file.write(chunk)
        except OSError as error:
            raise DownloadError(f"the file could not be stored in {self._part.parent}: {error}") from error

    def keep(self) -> None:
        """Verifies the digest and adds the file to the store."""
        got = self._hash.hexdigest()
        if got != self._target.name:
            raise InvalidRequest(
                f"the upload has the digest sha256:{got} ({self._size} bytes) instead of sha256:{self._target.name}: "
                "it was deleted; send it again",
                param="digest",
            )
        self._file.close()
        os.replace(self._part, self._target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def _check_room(self, more: int) -> None:
        if self._size + more > MAX_BYTES:
            raise InvalidRequest(
                f"the file is larger than {MAX_BYTES} bytes, the limit of one upload", code="request_too_large"
            )
        free = shutil.disk_usage(self._target.parent).free
        if more > free - FREE:
            raise InvalidRequest(
                f"the upload needs {more:,} bytes, and the store's disk has room for {max(free - FREE, 0):,}",
                code="request_too_large",
            )


def _folder() -> Path:
    return home() / "blobs"


def _files() -> list[Path]:
    return list(_folder().iterdir()) if _folder().exists() else []
