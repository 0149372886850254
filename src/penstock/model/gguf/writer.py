"""Writes GGUF files: first keys and tensor entries, then one tensor at a time, so that only one is in memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.model.gguf.reader import ARRAY, KINDS, NUMBERS, STRING, U32, U64
from penstock.model.tensor import Format

ALIGNMENT = 32
VERSION = 3
NUMBER_KINDS: dict[type, int] = {bool: 7, int: 4, float: 6}  # kinds of single values
ITEM_KINDS: dict[type, int] = {bool: 7, int: 5, float: 6}  # kinds of array items
FORMAT_KINDS = {name: kind for kind, name in KINDS.items()}

Advance = Callable[[str, int], None]  # tensor name, bytes written


class PendingTensor(NamedTuple):
    """Describes a tensor to be written; its bytes are computed when needed."""

    name: str
    format: Format
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[NDArray[np.uint8]]]

    @property
    def size(self) -> int:
        return prod(self.shape) // self.format.values * self.format.bytes


def encoded(value: Any) -> bytes:
    if isinstance(value, str):
        return U32.pack(STRING) + text(value)
    if isinstance(value, list):
        return U32.pack(ARRAY) + items(value)
    kind = NUMBER_KINDS[type(value)]
    return U32.pack(kind) + NUMBERS[kind].pack(value)


def items(values: list[Any]) -> bytes:
    if not values or isinstance(values[0], str):
        return U32.pack(STRING) + U64.pack(len(values)) + b"".join(map(text, values))
    kind = ITEM_KINDS[type(values[0])]
    return U32.pack(kind) + U64.pack(len(values)) + b"".join(map(NUMBERS[kind].pack, values))


def text(value: str) -> bytes:
    raw = value.encode()
    return U64.pack(len(raw)) + raw


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def header(keys: Mapping[str, bytes], tensors: Sequence[PendingTensor]) -> bytes:
    parts = [b"GGUF", U32.pack(VERSION), U64.pack(len(tensors)), U64.pack(len(keys))]
    parts += [text(key) + value for key, value in keys.items()]
    at = 0
    for tensor in tensors:
        dims = b"".join(U64.pack(dim) for dim in reversed(tensor.shape))
        kind = U32.pack(FORMAT_KINDS[tensor.format.name])
        parts.append(text(tensor.name) + U32.pack(len(tensor.shape)) + dims + kind + U64.pack(at))
        at += aligned(tensor.size)
    return b"".join(parts)


def file_size(keys: Mapping[str, bytes], tensors: Sequence[PendingTensor]) -> int:
    return aligned(len(header(keys, tensors))) + sum(aligned(tensor.size) for tensor in tensors)


def write_gguf(path: Path, keys: Mapping[str, bytes], tensors: Sequence[PendingTensor], advance: Advance) -> None:
    """Writes the whole file or nothing: a complete temporary file replaces `path`."""
    check_room(path, file_size(keys, tensors))
    with replacing(path) as file:
        write(file, header(keys, tensors))
        for tensor in tensors:
            for piece in tensor.pieces():
                file.write(piece.data)
                advance(tensor.name, piece.nbytes)
            write(file, b"")


def write(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.write(bytes(-file.tell() % ALIGNMENT))


def check_room(path: Path, size: int) -> None:
    """Raises if the disk has less than `size` bytes free."""
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise ModelError(f"{path} needs {size} bytes, but {path.parent} has {free} bytes free; free some space there")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces `path` on success."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def rows_at_once(rows: int, width: int, most: int = 1 << 25) -> Iterable[tuple[int, int]]:
    """Yields ranges of rows with at most `most` values each."""
    step = max(most // width, 1)
    return ((first, min(first + step, rows)) for first in range(0, rows, step))
