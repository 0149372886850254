"""Owns the memory that the KV caches of one engine process after another lie in."""

from __future__ import annotations

import os
from contextlib import suppress


class KvMemory:
    """Holds a file in memory (see backend/blocks/kv_file.py), where the system has such files. A closed file can be
    opened again, and is empty."""

    def __init__(self) -> None:
        self._file: int | None = None

    def open(self) -> str:
        """Returns the path that engines open it by; empty: there is none."""
        if self._file is None and hasattr(os, "memfd_create"):
            with suppress(OSError):  # too many files are open: an engine can do without
                self._file = os.memfd_create("penstock-kv")
        return "" if self._file is None else f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
