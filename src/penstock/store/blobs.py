"""Uploaded files, each called by its SHA-256.

<home>/blobs/<sha256>           a file, whole and checked
<home>/blobs/<sha256>.<…>.part  one that is arriving, or what an interrupted upload left
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

from penstock.errors import DownloadError, InvalidRequest
from penstock.store.places import home

MAX_BYTES = 2**38  # of a file
MAX_FILES = 64
FREE = 2**30  # bytes of the disk that uploads leave
UNUSED = 24 * 3600.0  # seconds that a file is kept of which no model is made


def blob_path(digest: str) -> Path:
    """Where the file of a digest such as `sha256:<64 hex digits>` lies, or would."""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise InvalidRequest(f"{digest[:80]!r} is no digest: write sha256: and 64 hexadecimal digits", param="digest")
    return _folder() / digest.removeprefix("sha256:")


def forget_unused(used: Collection[str]) -> None:
    """Removes old files that are not among the SHA-256 in `used`."""
    before = time.time() - UNUSED
    for file in _files():
        if file.name not in used and file.stat().st_mtime < before:
            file.unlink(missing_ok=True)


class Upload:
    """A file on its way in. It is there once `keep` has found it to be what its digest says; of one that is not, or
    that is left, nothing stays."""

    def __init__(self, digest: str, size: int) -> None:
        """`size` in bytes, where it is known beforehand, or 0."""
        self._target = blob_path(digest)
        self._target.parent.mkdir(parents=True, exist_ok=True)
        if len(_files()) >= MAX_FILES:
            raise InvalidRequest(
                f"{MAX_FILES} uploaded files are here, which is the most: delete models that were made of files"
            )
        self._size = 0
        self._check_room(size)
        self._hash = hashlib.sha256()
        self._part = self._target.with_name(f"{self._target.name}.{os.urandom(8).hex()}.part")
        self._file = self._part.open("xb", buffering=0)

    def write(self, chunk: bytes) -> None:
        self._check_room(len(chunk))
        self._size += len(chunk)
        self._hash.update(chunk)
        try:
            self._file.write(chunk)
        except OSError as error:
            raise DownloadError(f"the file could not be stored in {self._part.parent}: {error}") from error

    def keep(self) -> None:
        got = self._hash.hexdigest()
        if got != self._target.name:
            raise InvalidRequest(
                f"what arrived has the digest sha256:{got} ({self._size} bytes) instead of sha256:{self._target.name}: "
                "nothing was kept; send it again",
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
            raise InvalidRequest(f"a file may have {MAX_BYTES} bytes", code="request_too_large")
        free = shutil.disk_usage(self._target.parent).free
        if more > free - FREE:
            raise InvalidRequest(
                f"{more:,} bytes would arrive, and the disk of the store has {max(free - FREE, 0):,} to give",
                code="request_too_large",
            )


def _folder() -> Path:
    return home() / "blobs"


def _files() -> list[Path]:
    return list(_folder().iterdir()) if _folder().exists() else []
