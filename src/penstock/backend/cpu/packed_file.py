"""Reads and writes files of packed weights.

A file begins with MAGIC, the number of bytes of its description and the checksum of its weights. The description names
the weights and their layouts. The weights begin at the next multiple of PAGE, in the order in which they were packed.

They are read into memory and not mapped: mapped files have no huge pages, and decoding from them took 7 % longer. While
they are read they are summed, so a damaged file is never computed with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from struct import Struct

import numpy as np

from penstock.backend.cpu._native import PIECE_BYTES, Weight, checksum, read_packed
from penstock.backend.packed_cache import PackedCache, locked, make_room
from penstock.model.tensor import Bytes, Tensor

MAGIC = b"PENSTOCK"
HEAD = Struct("<8sQQ")
PAGE = 4096
LEAST_BYTES = 16 << 20  # fewer are packed within 5 ms


class PackedFile:
    """Collects the weights of a model, and reads them from their file or writes them to it."""

    def __init__(self, cache: PackedCache) -> None:
        self._cache = cache
        self._weights: list[Weight] = []
        self._described: list[tuple[int, list[tuple[str, int, str]]]] = []
        self.exists = cache.path.exists()

    def add(self, weight: Weight, parts: Sequence[Tensor]) -> None:
        self._weights.append(weight)
        self._described.append((weight.width, [(part.format.name, part.shape[0], part.name) for part in parts]))

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights)

    def read(self, threads: int) -> bool:
        """Fills all weights. Returns False, with all of them empty, without a file of exactly these; a damaged file is
        deleted."""
        try:
            with self._cache.path.open("rb", buffering=0) as file:
                return self._read(file.fileno(), threads)
        except OSError:
            return False

    def _read(self, file: int, threads: int) -> bool:
        description = self._description
        start = weights_start(description)
        head = os.pread(file, HEAD.size + len(description), 0)
        if len(head) < HEAD.size + len(description):
            return False
        magic, length, expected = HEAD.unpack_from(head)
        if (magic, length, head[HEAD.size :]) != (MAGIC, len(description), description):
            return False  # another version, or a changed model: it will be written anew
        if not read_packed(file, start, self._weights, expected, threads):
            import logging  # takes longer than packing most models

            logging.getLogger(__name__).warning(
                "%s is damaged: it is deleted, and weights are packed again", self._cache.path
            )
            self._cache.path.unlink(missing_ok=True)
            return False
        with suppress(OSError):  # the folder may not be writable
            os.utime(self._cache.path)
        return True

    def write(self) -> Generator[None, None, None]:
        """Writes the weights as they are now to the file, and yields after each piece. The file gets its name when it
        is complete; if the caller stops before, it is deleted. Raises OSError if it cannot be written, or another
        process writes it."""
        return self._write([weight.packed for weight in self._weights])

    def _write(self, weights: list[Bytes]) -> Generator[None, None, None]:
        path = self._cache.path
        make_room(self._cache, weights_start(self._description) + self.nbytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with locked(part) as file:
            try:
                file.truncate(0)
                yield from self._write_pieces(file.fileno(), weights)
                if not self._cache.source.exists():
                    raise FileNotFoundError(f"{self._cache.source} was removed meanwhile")
                part.rename(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    def _write_pieces(self, file: int, weights: list[Bytes]) -> Iterator[None]:
        description = self._description
        offset = weights_start(description)
        sums: list[int] = []
        for weight in weights:
            for at in range(0, weight.nbytes, PIECE_BYTES):
                piece = weight[at : at + PIECE_BYTES]
                sums.append(checksum(piece))
                write_whole(file, piece.data, offset + at)
                yield
            offset += weight.nbytes
        expected = checksum(np.array(sums, np.uint64).view(np.uint8))
        write_whole(file, memoryview(HEAD.pack(MAGIC, len(description), expected) + description), 0)

    @property
    def _description(self) -> bytes:
        return json.dumps([self._cache.key, self._described]).encode()


def weights_start(description: bytes) -> int:
    return -(-(HEAD.size + len(description)) // PAGE) * PAGE


def write_whole(file: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done
