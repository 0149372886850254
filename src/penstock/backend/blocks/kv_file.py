"""Keeps a KV cache in a file in memory, where the next engine finds it after this one has died.

header      a magic number, the size of the KV, and the fingerprint of model and backend
KV caches   of all programs, and hidden states: backend/cpu
ledger      the contents of each block: engine/kv_handover/ledger.py
"""

from __future__ import annotations

import os
from mmap import ALLOCATIONGRANULARITY, mmap

MAGIC = b"penstock KV 1\0\0\0"
FINGERPRINT = 16  # bytes
MAGIC_AT, SIZE_AT, FINGERPRINT_AT = 0, 16, 32
HEADER = ALLOCATIONGRANULARITY


class KvFile:
    """Is the open file. The process that gave the path owns it; it is empty at first."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.end = HEADER  # bytes taken so far
        self._grow(HEADER)
        self._header = mmap(self.descriptor, HEADER)

    @property
    def kv_memory(self) -> int:
        """Returns the bytes of KV that the file was made for; 0 if it is empty."""
        if self._header[MAGIC_AT : len(MAGIC)] != MAGIC:
            return 0
        return int.from_bytes(self._header[SIZE_AT : SIZE_AT + 8], "little")

    def take(self, size: int) -> mmap:
        start = -(-self.end // ALLOCATIONGRANULARITY) * ALLOCATIONGRANULARITY
        self._grow(start + size)
        self.end = start + size
        return mmap(self.descriptor, size, offset=start)

    def claim(self, fingerprint: bytes, kv_memory: int) -> None:
        """Marks the file as KV of `kv_memory` bytes with this fingerprint. Contents with another fingerprint are
        dropped first."""
        if self.kv_memory == kv_memory and self._header[FINGERPRINT_AT : FINGERPRINT_AT + FINGERPRINT] == fingerprint:
            return
        size = os.fstat(self.descriptor).st_size
        os.ftruncate(self.descriptor, 0)
        os.ftruncate(self.descriptor, size)
        self._header[FINGERPRINT_AT : FINGERPRINT_AT + FINGERPRINT] = fingerprint
        self._header[SIZE_AT : SIZE_AT + 8] = kv_memory.to_bytes(8, "little")
        self._header[MAGIC_AT : len(MAGIC)] = MAGIC

    def close(self) -> None:
        """Closes the file, once. Its mappings stay."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _grow(self, size: int) -> None:
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)
