"""Reads GGUF files, versions 2 and 3.

    magic  version  tensor count  key count | key kind value ... | name dims kind offset ... | padding | tensor data

The file is mapped, never read whole: tensors are views, and a metadata value is decoded on first use, because
vocabularies are long and not every reader needs them. Every header value is checked against the file size before use.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.open_files import map_file
from penstock.model.tensor import FEW_LEVELS, FORMATS, VECTORS_ONLY, Format, Tensor

# Format numbers in the file; those missing in FORMATS are only named in errors.
KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    41: "Q1_0", 42: "Q2_0",
}  # fmt: skip

NUMBERS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
U32, U64 = NUMBERS[4], NUMBERS[10]
STRING, ARRAY = 8, 9

MAX_COUNT = 1 << 22  # keys, tensors or array items: above any real file, and harmless
MAX_NAME = 1 << 16
MAX_STRING = 1 << 24
MAX_DIMS = 4
SHORT_STRING = 32  # bound on the average bytes per vocabulary string, including its length


class Cursor:
    """Moves forward through the file; reading past the end is an error."""

    def __init__(self, data: mmap.mmap, at: int = 0) -> None:
        self.data = data
        self.at = at

    def skip(self, size: int) -> int:
        """Moves past `size` bytes; returns their start."""
        start = self.at
        if size > len(self.data) - start:
            raise MalformedFile(f"the file ends at byte {len(self.data)}, inside a value that begins at byte {start}")
        self.at += size
        return start

    def number(self, layout: struct.Struct) -> Any:
        return layout.unpack_from(self.data, self.skip(layout.size))[0]

    def count(self, what: str, most: int = MAX_COUNT) -> int:
        """Reads a count; `what` names it in errors."""
        value: int = self.number(U64)
        if value > most:
            raise MalformedFile(f"{what} is {value}; at most {most} can be right")
        return value

    def text(self, most: int = MAX_STRING) -> str:
        """Reads a string of at most `most` bytes."""
        start = self.skip(self.count("the length of a string", most))
        return decoded(self.data[start : self.at])

    def skip_value(self, kind: int) -> None:
        if kind == STRING:
            self.skip(self.count("the length of a string", MAX_STRING))
        elif kind == ARRAY:
            self.skip_array()
        else:
            self.skip(number_layout(kind).size)

    def skip_array(self) -> None:
        kind, count = self.array_head()
        if kind == STRING:
            self.skip_strings(count)
        else:
            self.skip(count * number_layout(kind).size)

    def skip_strings(self, count: int) -> None:
        self.skip(int(string_heads(self.data, self.at, count)[-1]) - self.at)

    def array_head(self) -> tuple[int, int]:
        return self.number(U32), self.count("the length of an array")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        return self.number(NUMBERS[kind])

    def array(self) -> list[Any]:
        kind, count = self.array_head()
        if kind == STRING:
            return self.strings(count)
        layout = NUMBERS[kind]
        start = self.skip(count * layout.size)
        return [value for (value,) in layout.iter_unpack(self.data[start : self.at])]

    def strings(self, count: int) -> list[str]:
        """Reads all strings of an array at once: with every length overwritten by zeros, the rest is one text."""
        heads = string_heads(self.data, self.at, count)
        raw: NDArray[np.uint8] = np.frombuffer(self.data, np.uint8)[self.at : heads[-1]].copy()
        for i in range(U64.size):
            raw[heads[:-1] - self.at + i] = 0
        if np.count_nonzero(raw) + U64.size * count == len(raw):
            with suppress(UnicodeDecodeError):
                return raw.tobytes().decode().split("\0" * U64.size)[1:]
        return [decoded(self.data[head + U64.size : end]) for head, end in pairwise(heads.tolist())]


def string_heads(data: mmap.mmap, at: int, count: int) -> NDArray[np.int64]:
    heads = short_string_heads(data, at, count)
    return step_by_step(data, at, count) if heads is None else heads


def short_string_heads(data: mmap.mmap, at: int, count: int) -> NDArray[np.int64] | None:
    """Finds the strings of a vocabulary without a Python loop, which would slow down every start: lengths below 256 are
    a byte followed by seven zeros. Returns None if these candidates do not form a consistent chain.
    """
    window: NDArray[np.uint8] = np.frombuffer(data, np.uint8)[at : at + (count + 1) * SHORT_STRING]
    two = (window[:-1] == 0) & (window[1:] == 0)
    four = two[:-2] & two[2:]
    heads = np.flatnonzero(four[:-3] & four[3:])[:count] - 1
    ends = heads + U64.size + window[heads]
    if count == 0 or len(heads) < count or heads[0] != 0 or (heads[1:] != ends[:-1]).any():
        return None
    return at + np.append(heads, ends[-1])


def step_by_step(data: mmap.mmap, at: int, count: int) -> NDArray[np.int64]:
    heads, last = [at], len(data) - U64.size
    for _ in range(count):
        if heads[-1] > last:
            raise MalformedFile(f"the file ends inside {count} strings that begin at byte {at}")
        heads.append(heads[-1] + U64.size + U64.unpack_from(data, heads[-1])[0])
    if heads[-1] > len(data):
        raise MalformedFile(f"the file ends at byte {len(data)}, inside a string that begins at byte {heads[-2]}")
    return np.array(heads)


def decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise MalformedFile(f"the string {text[:40]!r} is not UTF-8") from error


def number_layout(kind: int) -> struct.Struct:
    if kind == ARRAY:
        raise MalformedFile("the metadata has an array of arrays; only arrays of strings and numbers are supported")
    if kind not in NUMBERS:
        raise MalformedFile(f"the metadata has a value of an unknown kind, {kind}")
    return NUMBERS[kind]


class Metadata(Mapping[str, Any]):
    """Holds a file's keys and values; a value is decoded on first use."""

    def __init__(self, cursor: Cursor, count: int) -> None:
        self._data = cursor.data
        self._places: dict[str, tuple[int, int]] = {}  # key: (kind, offset of its value)
        self._values: dict[str, Any] = {}
        for _ in range(count):
            key = cursor.text(MAX_NAME)
            if key in self._places:
                raise MalformedFile(f"the key {key!r} is there twice")
            self._places[key] = (cursor.number(U32), cursor.at)
            cursor.skip_value(self._places[key][0])

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            kind, at = self._places[key]
            self._values[key] = Cursor(self._data, at).value(kind)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def stored(self, key: str) -> bytes:
        kind, at = self._places[key]
        cursor = Cursor(self._data, at)
        cursor.skip_value(kind)
        return U32.pack(kind) + self._data[at : cursor.at]


class TensorEntry(NamedTuple):
    """Describes a tensor's header entry."""

    name: str
    format: Format
    shape: tuple[int, ...]
    offset: int  # from the start of the tensor data

    @property
    def size(self) -> int:
        return math.prod(self.shape) // self.format.values * self.format.bytes


class GgufFile:
    """Holds an open GGUF file."""

    def __init__(self, metadata: Metadata, tensors: dict[str, Tensor], data: mmap.mmap) -> None:
        self.metadata = metadata
        self.tensors = tensors  # file name: tensor
        self._data = data

    def close(self) -> None:
        """Closes the file; tensors still in use keep it mapped."""
        self.tensors = {}
        with suppress(BufferError):
            self._data.close()


def read_gguf(path: Path) -> GgufFile:
    data = map_file(path)
    try:
        cursor = Cursor(data)
        tensor_count, key_count = read_head(cursor)
        metadata = Metadata(cursor, key_count)
        entries = [read_entry(cursor) for _ in range(tensor_count)]
        tensors = cut_tensors(entries, cursor, alignment(metadata))
    except MalformedFile as error:
        raise MalformedFile(f"{path.name} is not a valid GGUF file: {error}; fetch it again") from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path.name} cannot be run: {error}") from error
    return GgufFile(metadata, tensors, data)


def read_head(cursor: Cursor) -> tuple[int, int]:
    """Reads the file's beginning; returns the number of tensors and of keys."""
    magic = cursor.data[cursor.skip(4) : cursor.at]
    if magic != b"GGUF":
        raise MalformedFile(f"it begins with {magic!r} instead of b'GGUF' (a Hugging Face model is a folder)")
    version = cursor.number(U32)
    if version not in (2, 3):
        raise UnsupportedModel(f"its GGUF version is {version}; supported: 2 and 3, little-endian")
    return cursor.count("the number of tensors"), cursor.count("the number of keys")


def alignment(metadata: Metadata) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or value <= 0 or value & (value - 1):
        raise MalformedFile(f"general.alignment is {value!r} instead of a power of two")
    return value


def read_entry(cursor: Cursor) -> TensorEntry:
    name = cursor.text(MAX_NAME)
    dims = cursor.number(U32)
    if not 1 <= dims <= MAX_DIMS:
        raise MalformedFile(f"tensor {name!r} has {dims} dimensions instead of 1 to {MAX_DIMS}")
    shape = tuple(cursor.number(U64) for _ in range(dims))[::-1]
    kind = cursor.number(U32)
    stored_as = KINDS.get(kind, "")
    matrices = FORMATS | FEW_LEVELS
    format = matrices.get(stored_as) or (VECTORS_ONLY.get(stored_as) if dims == 1 else None)
    if format is None:
        known = ", ".join(matrices)
        raise UnsupportedModel(f"tensor {name!r} is stored as {KINDS.get(kind, f'type {kind}')}; supported: {known}")
    if 0 in shape or shape[-1] % format.values:
        raise MalformedFile(
            f"tensor {name!r} of shape {shape} cannot be stored as {format.name}, whose blocks hold {format.values}"
        )
    return TensorEntry(name, format, shape, cursor.number(U64))


def cut_tensors(entries: list[TensorEntry], cursor: Cursor, align: int) -> dict[str, Tensor]:
    """Returns views of the mapped file; raises unless every tensor lies inside it, aligned and without overlap."""
    base = -(-cursor.at // align) * align
    data: NDArray[np.uint8] = np.frombuffer(cursor.data, np.uint8)
    tensors: dict[str, Tensor] = {}
    needed = max((base + entry.offset + entry.size for entry in entries), default=0)
    if needed > len(data):
        raise MalformedFile(f"it is cut off: its tensors end at byte {needed:,}, and the file has {len(data):,} bytes")
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        name, format, shape, offset = entry
        if name in tensors:
            raise MalformedFile(f"tensor {name!r} is there twice")
        if offset % align or offset < end:
            raise MalformedFile(
                f"tensor {name!r} claims {entry.size} bytes at offset {offset}: misaligned, or over another tensor"
            )
        end = offset + entry.size
        tensor = Tensor(name, format, shape, data[base + offset : base + end])
        tensors[name] = readable(tensor)
    return tensors


def readable(tensor: Tensor) -> Tensor:
    if tensor.format.name in FEW_LEVELS:
        from penstock.model.gguf.few_levels import as_q4_0  # rarely needed

        return as_q4_0(tensor)
    return widened(tensor) if tensor.format.name in VECTORS_ONLY else tensor


def widened(vector: Tensor) -> Tensor:
    numbers = vector.data.view(f"<{vector.format.name[0].lower()}{vector.format.bytes}").astype(np.float32)
    return Tensor(vector.name, FORMATS["F32"], vector.shape, numbers.view(np.uint8))
