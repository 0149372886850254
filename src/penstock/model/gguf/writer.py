"""Writing GGUF files: keys and places first, then one tensor after the other, none of them held with another."""

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
NUMBER_KINDS: dict[type, int] = {bool: 7, int: 4, float: 6}  # of one value
ITEM_KINDS: dict[type, int] = {bool: 7, int: 5, float: 6}  # of an array's
FORMAT_KINDS = {name: kind for kind, name in KINDS.items()}

Advance = Callable[[str, int], None]  # the tensor's name, bytes that were written of it


class Sheet(NamedTuple):
    """A tensor to be written: its bytes are made when their turn comes."""

    name: str
    format: Format
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[NDArray[np.uint8]]]

    @property
    def size(self) -> int:
        return prod(self.shape) // self.format.values * self.format.bytes


def encoded(value: Any) -> bytes:
    """A value of the metadata, its kind before it."""
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


def header(keys: Mapping[str, bytes], sheets: Sequence[Sheet]) -> bytes:
    parts = [b"GGUF", U32.pack(VERSION), U64.pack(len(sheets)), U64.pack(len(keys))]
    parts += [text(key) + value for key, value in keys.items()]
    at = 0
    for sheet in sheets:
        dims = b"".join(U64.pack(dim) for dim in reversed(sheet.shape))
        kind = U32.pack(FORMAT_KINDS[sheet.format.name])
        parts.append(text(sheet.name) + U32.pack(len(sheet.shape)) + dims + kind + U64.pack(at))
        at += aligned(sheet.size)
    return b"".join(parts)


def file_size(keys: Mapping[str, bytes], sheets: Sequence[Sheet]) -> int:
    return aligned(len(header(keys, sheets))) + sum(aligned(sheet.size) for sheet in sheets)


def write_gguf(path: Path, keys: Mapping[str, bytes], sheets: Sequence[Sheet], advance: Advance) -> None:
    """The whole file, or none: it takes its name when it is complete."""
    check_room(path, file_size(keys, sheets))
    with replacing(path) as file:
        write(file, header(keys, sheets))
        for sheet in sheets:
            for piece in sheet.pieces():
                file.write(piece.data)
                advance(sheet.name, piece.nbytes)
            write(file, b"")


def write(file: IO[bytes], data: bytes) -> None:
    """And zeros up to the next place where a tensor may begin."""
    file.write(data)
    file.write(bytes(-file.tell() % ALIGNMENT))


def check_room(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise ModelError(f"{path} would take {size} bytes; {path.parent} has {free} free")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
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
    """Runs of rows that hold so many values at most."""
    step = max(most // width, 1)
    return ((first, min(first + step, rows)) for first in range(0, rows, step))
