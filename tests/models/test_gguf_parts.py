"""GGUF files that are a part of a model, and tensors of plain numbers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from penstock.errors import MalformedFile, ModelNotFound, UnsupportedModel
from penstock.model.dequantize import dequantize
from penstock.model.gguf.reader import read_gguf
from penstock.model.gguf.shards import read_shards
from penstock.model.load import open_checkpoint

NAMES = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


def write(path: Path, values: dict[str, np.ndarray], **numbers: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    if path.name == NAMES[0]:
        writer.add_string("general.name", "whole")
    for key, value in numbers.items():
        (writer.add_uint16 if key != "tensors" else writer.add_int32)(KEYS[key], value)
    for name, one in values.items():
        writer.add_tensor(name, one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KEYS = {"no": "split.no", "count": "split.count", "tensors": "split.tensors.count"}


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in NAMES]
    for number, path in enumerate(paths):
        write(path, {f"t{number}": np.full(4, number, np.float32)}, no=number, count=3, tensors=3)
    return paths


def test_parts_are_read_as_one(parts):
    for path in parts:
        file = read_shards(path)
        assert {name: dequantize(one).tolist() for name, one in file.tensors.items()} == {
            f"t{number}": [number] * 4 for number in range(3)
        }
        assert file.metadata["general.name"] == "whole"


def test_a_missing_part_is_named(parts):
    parts[1].unlink()
    with pytest.raises(
        ModelNotFound, match=r"one of 3 shards of a model, but there is no m-00002-of-00003\.gguf in its folder$"
    ):
        read_shards(parts[2])
    parts[0].unlink()
    with pytest.raises(ModelNotFound, match=r"no m-00001-of-00003\.gguf in its folder, and 1 more shards are missing"):
        read_shards(parts[2])


def test_a_part_must_keep_its_name(parts):
    other = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(MalformedFile, match=r"model\.gguf is one of 3 shards .* must end in -00001-of-00003\.gguf"):
        read_shards(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no": 2, "count": 3, "tensors": 3}, r"split\.no and split\.count are \(2, 3\), not \(1, 3\)"),
        ({"no": 1, "count": 4, "tensors": 3}, r"are \(1, 4\), not \(1, 3\)"),
        ({"no": 1, "count": 3, "tensors": 3}, r"tensor 't0' of m-00002-of-00003\.gguf is also in an earlier shard"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, change, message):
    write(parts[1], {"t0": np.zeros(4, np.float32)}, **change)
    with pytest.raises(MalformedFile, match=message):
        read_shards(parts[0])


def test_lost_tensors_are_noticed(parts):
    write(parts[0], {"t0": np.zeros(4, np.float32)}, no=0, count=3, tensors=5)
    with pytest.raises(MalformedFile, match="have 3 tensors, not 5"):
        read_shards(parts[0])


def test_a_split_model_is_opened(goldens, tmp_path):
    whole = open_checkpoint(goldens / "tied" / "model.gguf")
    reader = gguf.GGUFReader(goldens / "tied" / "model.gguf")
    for number in range(2):
        writer = gguf.GGUFWriter(tmp_path / f"m-{number + 1:05}-of-00002.gguf", "llama")
        for field in reader.fields.values():
            if number == 0 and "." in field.name and field.name != "general.architecture":
                writer.add_key_value(field.name, field.contents(), field.types[0], *field.types[1:])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for one in reader.tensors[number::2]:
            writer.add_tensor(one.name, one.data, raw_dtype=one.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    split = open_checkpoint(tmp_path / "m-00002-of-00002.gguf")
    assert split.spec == whole.spec
    assert {name: one.data.tobytes() for name, one in split.tensors.items()} == {
        name: one.data.tobytes() for name, one in whole.tensors.items()
    }


@pytest.mark.parametrize("kind", [np.float64, np.int64, np.int32, np.int16, np.int8])
def test_vectors_of_plain_numbers_become_floats(tmp_path, kind):
    write(tmp_path / "v.gguf", {"v": np.array([-3, 0, 100], kind)})
    (vector,) = read_gguf(tmp_path / "v.gguf").tensors.values()
    assert (vector.format.name, dequantize(vector).tolist()) == ("F32", [-3, 0, 100])


def test_matrices_of_plain_numbers_are_refused(tmp_path):
    write(tmp_path / "m.gguf", {"m": np.ones((2, 2), np.int32)})
    with pytest.raises(UnsupportedModel, match="'m' is stored as I32; supported: F32"):
        read_gguf(tmp_path / "m.gguf")
