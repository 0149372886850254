"""GGUF files that are damaged: one clear error, at once, and no memory to speak of."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backend.ref import RefBackend
from penstock.errors import MalformedFile, ModelNotFound, PenstockError, UnsupportedModel
from penstock.model.dequantize import dequantize
from penstock.model.gguf.reader import read_gguf
from penstock.model.load import load_model, open_checkpoint
from tests.examples import examples

MEGABYTE = 1 << 20


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def head(tensors: int = 0, keys: int = 0, *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + u32(version) + u64(tensors) + u64(keys)


def tensor(name: str = "t", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(shape)) + b"".join(u64(dim) for dim in shape) + u32(kind) + u64(offset)


def tensors(*infos: bytes, key: bytes = b"") -> bytes:
    """A file of these tensors, with 64 bytes of data."""
    start = head(len(infos), 1 if key else 0) + key + b"".join(infos)
    return start + bytes(-len(start) % 32) + bytes(64)


def key(value: bytes, name: str | bytes = "k") -> bytes:
    return head(keys=1) + text(name) + value


STRING, ARRAY, U32, F32 = u32(8), u32(9), u32(4), u32(6)
ALIGNMENT = text("general.alignment")

MALFORMED = {
    "empty": (b"", "is empty"),
    "short magic": (b"GG", "ends at byte 2"),
    "wrong magic": (head(magic=b"GGML"), "b'GGML'"),
    "no counts": (b"GGUF" + u32(3), "ends at byte 8"),
    "absurd tensor count": (head(tensors=2**63), "number of tensors is 9223372036854775808"),
    "tensor count beyond the file": (head(tensors=1000), "ends at byte"),
    "absurd key count": (head(keys=2**64 - 1), "number of keys"),
    "key count beyond the file": (head(keys=4_000_000), "ends at byte"),
    "long key": (head(keys=1) + u64(2**40) + b"k", "length of a string is 1099511627776"),
    "key past the end": (head(keys=1) + u64(60000) + b"k", "ends at byte"),
    "key that is not UTF-8": (key(U32 + u32(1), name=b"\xff"), "not UTF-8"),
    "key twice": (head(keys=2) + 2 * (text("k") + U32 + u32(1)), "'k' is there twice"),
    "unknown kind of value": (key(u32(13) + u64(0)), "unknown kind, 13"),
    "long string": (key(STRING + u64(2**63)), "length of a string"),
    "string past the end": (key(STRING + u64(1000) + b"short"), "ends at byte"),
    "number past the end": (key(U32 + b"\0"), "ends at byte"),
    "absurd array": (key(ARRAY + U32 + u64(2**62)), "length of an array"),
    "array past the end": (key(ARRAY + u32(12) + u64(4_000_000)), "ends at byte"),
    "strings past the end": (key(ARRAY + STRING + u64(4_000_000) + text("a")), "inside 4000000 strings"),
    "string of an array past the end": (key(ARRAY + STRING + u64(1) + u64(2**64 - 1)), "ends at byte"),
    "array of arrays": (key(ARRAY + ARRAY + u64(1) + U32 + u64(1) + u32(1)), "array of arrays"),
    "array of an unknown kind": (key(ARRAY + u32(77) + u64(1)), "unknown kind, 77"),
    "alignment of 0": (tensors(tensor(), key=ALIGNMENT + U32 + u32(0)), "power of two"),
    "alignment of 24": (tensors(tensor(), key=ALIGNMENT + U32 + u32(24)), "power of two"),
    "alignment in words": (tensors(tensor(), key=ALIGNMENT + STRING + text("32")), "power of two"),
    "alignment beyond the file": (
        tensors(tensor(), key=ALIGNMENT + U32 + u32(2**31)),
        "it is cut off: its tensors end at byte",
    ),
    "no dimensions": (tensors(tensor(shape=())), "0 dimensions"),
    "many dimensions": (tensors(tensor(shape=(1,) * 5)), "5 dimensions"),
    "absurd dimensions": (tensors(text("t") + u32(2**32 - 1)), "4294967295 dimensions"),
    "dimension of 0": (tensors(tensor(shape=(4, 0))), "cannot be stored as F32"),
    "sizes that overflow": (tensors(tensor(shape=(2**32, 2**32, 2**32))), "it is cut off: its tensors end"),
    "row that is no whole blocks": (tensors(tensor(shape=(33,), kind=2)), "cannot be stored as Q4_0"),
    "offset outside the file": (tensors(tensor(offset=2**40)), "it is cut off: its tensors end"),
    "end outside the file": (tensors(tensor(shape=(17,))), "it is cut off: its tensors end"),
    "misaligned offset": (tensors(tensor(offset=4)), "misaligned"),
    "tensors over each other": (tensors(tensor("a", shape=(9,)), tensor("b", offset=32)), "over another"),
    "tensor twice": (tensors(tensor("a"), tensor("a", offset=32)), "'a' is there twice"),
    "no tensor data": (head(tensors=1) + tensor(), "it is cut off: its tensors end"),
}


SOUND_KEYS = (
    ALIGNMENT + U32 + u32(32),
    text("name") + STRING + text("é"),
    text("words") + ARRAY + STRING + u64(3) + text("a") + text("") + text("bc"),
    text("sizes") + ARRAY + U32 + u64(3) + u32(1) + u32(2) + u32(3),
)
SOUND_HEAD = head(2, 4) + b"".join(SOUND_KEYS) + tensor("a") + tensor("b", (32, 1), kind=2, offset=32)
SOUND = SOUND_HEAD + bytes(-len(SOUND_HEAD) % 32) + bytes(range(50))


def within(size: int, work: Callable[[], object]) -> None:
    """Runs `work`, whatever it raises, and sees that it needed no more than this memory."""
    tracemalloc.start()
    try:
        work()
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < size


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed(tmp_path, kind):
    data, message = MALFORMED[kind]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(MalformedFile, match=message) as error:
        within(MEGABYTE, lambda: read_gguf(path))
    assert "bad.gguf" in error.value.message
    assert "\n" not in error.value.message


def test_the_sound_file_is_read(tmp_path):
    path = tmp_path / "good.gguf"
    path.write_bytes(SOUND)
    file = read_gguf(path)
    assert dict(file.metadata) == {"general.alignment": 32, "name": "é", "words": ["a", "", "bc"], "sizes": [1, 2, 3]}
    assert [dequantize(one).shape for one in file.tensors.values()] == [(8,), (1, 32)]


@pytest.mark.parametrize(("kind", "name"), [(9, "Q8_1"), (15, "Q8_K"), (4, "type 4"), (999, "type 999")])
def test_unsupported_tensor_types_are_named(tmp_path, kind, name):
    (tmp_path / "x.gguf").write_bytes(tensors(tensor("blk.0.x", kind=kind)))
    with pytest.raises(UnsupportedModel, match=rf"'blk\.0\.x' is stored as {name}; supported: F32"):
        read_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_unsupported_versions_are_named(tmp_path, version):
    (tmp_path / "x.gguf").write_bytes(head(version=version))
    with pytest.raises(UnsupportedModel, match=f"version is {version};"):
        read_gguf(tmp_path / "x.gguf")


def test_no_file(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no file .*none\.gguf"):
        read_gguf(tmp_path / "none.gguf")


def test_empty_arrays(tmp_path):
    (tmp_path / "x.gguf").write_bytes(key(ARRAY + STRING + u64(0)))
    assert read_gguf(tmp_path / "x.gguf").metadata["k"] == []


def test_values_that_are_not_utf8(tmp_path):
    for value in (STRING + text(b"\xff\xfe"), ARRAY + STRING + u64(2) + text(b"ok") + text(b"\xff\xfe")):
        (tmp_path / "x.gguf").write_bytes(key(value))
        metadata = read_gguf(tmp_path / "x.gguf").metadata
        with pytest.raises(MalformedFile, match=r"the string b'\\xff\\xfe' is not UTF-8"):
            metadata["k"]


# Damage at random.


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.gguf"


def rewrite(path: Path, data: bytes) -> Path:
    path.unlink(missing_ok=True)  # a mapping of the file before keeps its bytes
    path.write_bytes(data)
    return path


def read_all(path: Path) -> None:
    """Either everything can be read, or there is one clear error."""
    try:
        file = read_gguf(path)
        dict(file.metadata)
        for one in file.tensors.values():
            dequantize(one)
    except PenstockError:
        pass


def open_all(path: Path) -> None:
    try:
        backend = RefBackend()
        backend.load(load_model(open_checkpoint(path), backend))
    except PenstockError:
        pass


def damage(size: int) -> st.SearchStrategy[list[tuple[int, bytes]]]:
    """Bytes and whole numbers, extreme ones among them, written anywhere."""
    numbers = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]).map(u64)
    return st.lists(st.tuples(st.integers(0, size - 1), st.binary(min_size=1, max_size=4) | numbers), max_size=4)


def damaged(data: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    out = bytearray(data)
    for at, patch in changes:
        out[at : at + len(patch)] = patch
    return bytes(out)


@settings(max_examples=examples(500))
@given(changes=damage(len(SOUND_HEAD)))
def test_damaged_headers(scratch, changes):
    within(MEGABYTE, lambda: read_all(rewrite(scratch, damaged(SOUND, changes))))


def test_truncated_anywhere(scratch):
    for size in range(len(SOUND)):
        with pytest.raises(MalformedFile):
            read_gguf(rewrite(scratch, SOUND[:size]))


@settings(max_examples=examples(200))
@given(st.binary(max_size=300).map(lambda data: head(1, 2) + data))
def test_noise_after_the_head(scratch, data):
    within(MEGABYTE, lambda: read_all(rewrite(scratch, data)))


@settings(max_examples=examples(300))
@given(changes=damage(1790))
def test_damaged_models(goldens, scratch, changes):
    """The header of a whole model: metadata may be sound as such and make no sense as a model."""
    good = (goldens / "llama3" / "model.gguf").read_bytes()
    within(4 * MEGABYTE, lambda: open_all(rewrite(scratch, damaged(good, changes))))


@settings(max_examples=examples(300))
@given(st.lists(st.text(max_size=12) | st.sampled_from(["", "\0", "\0" * 7, "a\0", "é" * 127, "x" * 255, "x" * 256])))
def test_strings_of_any_kind_are_read_back(scratch, strings):
    """Vocabularies are read in one go; what is unlike a vocabulary, string by string."""
    value = ARRAY + STRING + u64(len(strings)) + b"".join(map(text, strings))
    assert read_gguf(rewrite(scratch, key(value))).metadata["k"] == strings
