"""Owns the KV cache, and a GPU's weights, that one engine process leaves to the next."""

from __future__ import annotations

import os
from contextlib import suppress

from penstock.ipc.post_mortem import DRIVER
from penstock.system.descriptor_store import DescriptorStore


class KvMemory:
    """Holds a file in memory (see backend/blocks/kv_file.py), where the system has such files, and descriptors of a
    GPU's memory (see backend/cuda/keeper.py). A closed file can be opened again, and is empty."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._descriptors = DescriptorStore()

    def open(self) -> str:
        """Returns the path that engines open it by; empty: there is none."""
        if self._file is None and hasattr(os, "memfd_create"):
            with suppress(OSError):  # too many files are open: an engine can do without
                self._file = os.memfd_create("penstock-kv")
        return "" if self._file is None else f"/proc/{os.getpid()}/fd/{self._file}"

    def open_descriptors(self) -> str:
        """Returns the address of the store for descriptors of a GPU's memory; empty: there is no GPU."""
        return self._descriptors.open() if DRIVER.exists() else ""

    def close(self) -> None:
        self._descriptors.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None
