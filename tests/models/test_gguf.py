"""GGUF files: what the gguf package writes is read back, bit for bit."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType

from penstock.model.dequantize import LAYOUTS, VALUES, dequantize, layout_of
from penstock.model.gguf import iquants
from penstock.model.gguf.few_levels import as_q4_0
from penstock.model.gguf.reader import read_gguf
from penstock.model.tensor import FEW_LEVELS, FORMATS, INTEGERS, Format, Tensor

ARRAYS = {
    "words": ["a", "", "Grüße", "日本", "long" * 100, ""],
    "odd words": ["a\0", "\0" * 9, "", "b"],
    "whole": [1, -2, 3],
    "real": [0.5, -1.25],
    "flags": [True, False],
}
NUMBERS = {
    "u8": (GGUFValueType.UINT8, 255),
    "i8": (GGUFValueType.INT8, -128),
    "u16": (GGUFValueType.UINT16, 65535),
    "i16": (GGUFValueType.INT16, -32768),
    "u32": (GGUFValueType.UINT32, 2**32 - 1),
    "i32": (GGUFValueType.INT32, -(2**31)),
    "u64": (GGUFValueType.UINT64, 2**64 - 1),
    "i64": (GGUFValueType.INT64, -(2**63)),
    "f32": (GGUFValueType.FLOAT32, 0.375),
    "f64": (GGUFValueType.FLOAT64, 1e300),
    "bool": (GGUFValueType.BOOL, True),
}


def random_bytes(format: str, rows: int = 3) -> np.ndarray:
    size = 2 * FORMATS[format].bytes
    return np.random.default_rng(rows).integers(256, size=(rows, size), dtype=np.uint8)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of everything, by the gguf package."""
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("text", "a\nb\0c é")
    for key, (kind, value) in NUMBERS.items():
        writer.add_key_value(key, value, kind)
    for key, value in ARRAYS.items():
        writer.add_array(key, value)
    for format in FORMATS:
        writer.add_tensor(f"a {format} tensor", random_bytes(format), raw_dtype=GGMLQuantizationType[format])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_is_read_back(written):
    metadata = read_gguf(written).metadata
    wanted = {key: value for key, (_, value) in NUMBERS.items()} | ARRAYS | {"text": "a\nb\0c é"}
    assert {key: metadata[key] for key in wanted} == wanted
    assert metadata["general.architecture"] == "llama"
    assert len(metadata) == len(list(metadata)) == len(wanted) + 1
    assert "absent" not in metadata


def test_values_are_decoded_once(written):
    metadata = read_gguf(written).metadata
    assert metadata["words"] is metadata["words"]


@pytest.mark.parametrize("format", FORMATS)
def test_tensors_are_read_back(written, format):
    tensor = read_gguf(written).tensors[f"a {format} tensor"]
    assert tensor.format == FORMATS[format]
    assert tensor.shape == (3, 2 * FORMATS[format].values)
    assert tensor.data.tobytes() == random_bytes(format).tobytes()


@pytest.mark.parametrize("format", FORMATS)
def test_dequantized_as_the_gguf_package_does(format):
    """Bit for bit, over random bytes: scales that are not finite included."""
    data = random_bytes(format, rows=101)
    shape = (101, 2 * FORMATS[format].values)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(data, GGMLQuantizationType[format]).reshape(shape)
    got = dequantize(Tensor("x", FORMATS[format], shape, data.reshape(-1)))
    assert got.dtype == np.float32
    assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32))


def random_few_levels(format: Format, rows: int) -> np.ndarray:
    """Random codes with scales that are numbers: [rows, 2 blocks, bytes]."""
    rng = np.random.default_rng(format.values)
    blocks = rng.integers(256, size=(rows, 2, format.bytes), dtype=np.uint8)
    blocks[..., :2] = rng.normal(size=(rows, 2, 1)).astype("<f2").view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", FEW_LEVELS)
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["matrix", "experts"])
def test_one_and_two_bits_become_q4_0(name, shape):
    """The values are those of llama.cpp's definition: code j lies at the lowest free bits of byte j * bits // 8."""
    format = FEW_LEVELS[name]
    blocks, bits = random_few_levels(format, rows=6), format.bytes * 8 // format.values
    tensor = as_q4_0(Tensor("x", format, (*shape, 2 * format.values), blocks.reshape(-1)))
    scale = blocks[..., :2].copy().view("<f2").astype(np.float32)
    place = np.arange(format.values) * bits
    codes = blocks[..., 2 + place // 8] >> (place % 8).astype(np.uint8) & (1 << bits) - 1
    wanted = scale * (codes.astype(np.float32) - 1 if bits == 2 else 2 * codes.astype(np.float32) - 1)
    assert tensor.format == FORMATS["Q4_0"]
    assert np.array_equal(dequantize(tensor), wanted.reshape(tensor.shape))


@pytest.mark.parametrize(("name", "kind"), [("Q1_0", 41), ("Q2_0", 42)])
def test_files_with_one_and_two_bits_are_read(name, kind, tmp_path):
    """The gguf package cannot write Q2_0 yet: the header of a tensor with blocks of as many bytes is changed."""
    format = FEW_LEVELS[name]
    blocks = random_few_levels(format, rows=3)
    writer = gguf.GGUFWriter(tmp_path / "few.gguf", "llama")
    writer.add_tensor("x", blocks.reshape(3, -1), raw_dtype=GGMLQuantizationType.Q1_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    written, wanted = (struct.pack("<QQI", 2 * values, 3, of) for values, of in ((128, 41), (format.values, kind)))
    data = (tmp_path / "few.gguf").read_bytes()
    assert data.count(written) == 1
    (tmp_path / "few.gguf").write_bytes(data.replace(written, wanted))
    found = read_gguf(tmp_path / "few.gguf").tensors["x"]
    same = as_q4_0(Tensor("x", format, (3, 2 * format.values), blocks.reshape(-1)))
    assert (found.format, found.shape) == (same.format, same.shape)
    assert np.array_equal(found.data, same.data)


def test_every_format_has_its_layout():
    formats = FORMATS | {"I8": INTEGERS["I8"]}
    assert {f.name: layout_of(f.name).itemsize for f in formats.values()} == {f.name: f.bytes for f in formats.values()}
    assert VALUES.keys() == LAYOUTS.keys()
    assert iquants.SPLIT.keys() == iquants.LAYOUTS.keys() == iquants.TABLES.keys() == iquants.FACTORS.keys()


def test_tensors_are_views_and_outlive_the_file(written):
    file = read_gguf(written)
    tensor = file.tensors["a Q4_K tensor"]
    assert not tensor.data.flags.owndata
    assert not tensor.data.flags.writeable
    file.close()
    assert tensor.data.tobytes() == random_bytes("Q4_K").tobytes()


def test_version_2_is_read(written, tmp_path):
    data = bytearray(written.read_bytes())
    data[4] = 2
    (tmp_path / "v2.gguf").write_bytes(data)
    assert read_gguf(tmp_path / "v2.gguf").metadata["words"] == ARRAYS["words"]


def test_alignment_is_followed(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(128)
    for name in ("one", "two"):
        writer.add_tensor(name, np.full(3, len(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert dequantize(read_gguf(tmp_path / "a.gguf").tensors["two"]).tolist() == [3, 3, 3]
