"""Hugging Face folders as GGUF files: what is written is what llama.cpp's own converter would have written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock.backend.cpu.quantize import quantize
from penstock.errors import ConfigError, MalformedFile, ModelError, UnsupportedModel
from penstock.model.export import Export, export
from penstock.model.fields import Fields
from penstock.model.gguf import read_gguf
from penstock.model.load import CONFIG, open_checkpoint
from penstock.model.quant import dequantize
from penstock.model.tensor import Format, Tensor, some_rows
from penstock.model.to_gguf import OWN, config_keys, difference
from penstock.model.write_gguf import encoded, write_gguf

GOLDENS = Path(__file__).parent / "goldens"
ENCODERS = Path(__file__).parent / "encoders"
NAMES = sorted(folder.name for folder in GOLDENS.iterdir())
WRITTEN = [name for name in NAMES if open_checkpoint(GOLDENS / name).spec.arch in OWN]


def encode(tensor: Tensor, format: Format) -> Tensor:
    return quantize(tensor, format, threads=1)


def written(path: Path, made: Export) -> Path:
    write_gguf(path, made.keys, made.sheets, lambda name, size: None)
    return path


@pytest.fixture(autouse=True)
def no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goldens have no tokenizers."""
    monkeypatch.setattr("penstock.text.export.text_keys", lambda path, size: {"tokenizer.ggml.model": "none"})


@pytest.mark.parametrize("name", WRITTEN)
def test_the_file_says_what_the_folder_says(name: str, tmp_path: Path) -> None:
    check_alike(written(tmp_path / "model.gguf", export(GOLDENS / name, "f32", encode)), GOLDENS / name / "model.gguf")


def check_alike(path: Path, golden: Path) -> None:
    made, expected = read_gguf(path), read_gguf(golden)
    wanted, found = open_checkpoint(golden), open_checkpoint(path)
    assert not difference(wanted.spec, found.spec)
    unused = f"blk.{wanted.spec.layers}."
    assert made.tensors.keys() == {name for name in expected.tensors if not name.startswith(unused)}
    for tensor in made.tensors.values():
        values = dequantize(expected.tensors[tensor.name])
        assert values.shape == tensor.shape
        assert np.allclose(values, dequantize(tensor), rtol=1e-3, atol=1e-6), tensor.name
    said = {key: value for key, value in expected.metadata.items() if key != "general.name"}
    if wanted.spec.unused_layers:  # which are not written
        said = {key: value for key, value in said.items() if not key.endswith(("block_count", "nextn_predict_layers"))}
    texts = {key: value for key, value in said.items() if isinstance(value, str | list)}
    numbers = {key: value for key, value in said.items() if key not in texts}
    assert {key: made.metadata[key] for key in texts} == texts
    assert {key: made.metadata[key] for key in numbers} == pytest.approx(numbers, rel=1e-6)


@pytest.mark.parametrize("name", ["bert", "nomic"])
def test_encoders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their tokenizers."""
    monkeypatch.undo()
    folder = tmp_path / name
    shutil.copytree(ENCODERS / name, folder, ignore=shutil.ignore_patterns("sentence_bert_config.json"))
    check_alike(written(tmp_path / "model.gguf", export(folder, "f32", encode)), ENCODERS / name / "model.gguf")


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_positions_that_an_encoder_uses(name: str, tmp_path: Path) -> None:
    """As many as texts are long at most, and the first of them is the first row."""
    folder = open_checkpoint(ENCODERS / name)
    found = open_checkpoint(written(tmp_path / "model.gguf", export(ENCODERS / name, "f32", encode)))
    first = folder.spec.first_position
    rows = dequantize(folder.tensors["positions"])[first : first + 50]
    assert np.array_equal(dequantize(found.tensors["positions"]), rows)
    assert (found.spec.max_len, found.spec.pooling) == (50, folder.spec.pooling)


def test_attention_in_odd_layers_is_refused() -> None:
    checkpoint = open_checkpoint(GOLDENS / "qwen35")
    odd = replace(checkpoint.spec, recurrent=frozenset((1, 2)))
    with pytest.raises(UnsupportedModel, match=r"a GGUF file of qwen35 cannot say .* recurrent is"):
        config_keys(Fields(checkpoint.metadata, CONFIG), odd, {"token_embd.weight": checkpoint.tensors["embed"]})


def test_shapes_are_checked_first(folder_with: Callable[..., Path]) -> None:
    def shortened(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
        tensors[name] = some_rows(tensors[name], 0, 90)

    with pytest.raises(MalformedFile, match=r"in_proj_qkvz.* needs \(96, 32\)"):
        export(folder_with("qwen3next", tensors=shortened), "q8_0", encode)


def test_sections_of_the_rope_are_kept(folder_with: Callable[..., Path], tmp_path: Path) -> None:
    def sections(config: dict[str, Any]) -> None:
        config["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [0, 1, 1]}
        text = {key: config.pop(key) for key in [*config] if key != "architectures"}
        config |= {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
        config["tie_word_embeddings"] = True

    path = written(tmp_path / "model.gguf", export(folder_with("qwen35", sections), "f32", encode))
    assert read_gguf(path).metadata["qwen35.rope.dimension_sections"] == [0, 1, 1, 0]


def test_families_without_words_for_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OWN, "llama")
    with pytest.raises(UnsupportedModel, match="the family llama cannot be written as GGUF yet; qwen2"):
        export(GOLDENS / "tied", "f32", encode)


def test_others_read_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", export(GOLDENS / "qwen2", "q8_0", encode))
    reader = gguf.GGUFReader(path)
    expected = read_gguf(path)
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors} == {
        name: tensor.format.name for name, tensor in expected.tensors.items()
    }
    assert all(np.array_equal(t.data.reshape(-1).view(np.uint8), expected.tensors[t.name].data) for t in reader.tensors)
    assert reader.fields["qwen2.block_count"].contents() == 2
    assert reader.fields["general.file_type"].contents() == 7


def test_a_gguf_file_keeps_its_keys(tmp_path: Path) -> None:
    source = read_gguf(GOLDENS / "gemma3" / "model.gguf")
    path = written(tmp_path / "model.gguf", export(GOLDENS / "gemma3" / "model.gguf", "q8_0", encode))
    made = read_gguf(path)
    kept = {key: made.metadata[key] for key in made.metadata if key != "general.file_type"}
    assert kept == {key: source.metadata[key] for key in source.metadata}
    assert made.metadata["general.file_type"] == 7
    assert made.tensors["blk.0.attn_q.weight"].format.name == "Q8_0"
    assert made.tensors["blk.0.attn_norm.weight"].format.name == "F32"


def test_quantized_weights_need_a_word(tmp_path: Path) -> None:
    first = written(tmp_path / "first.gguf", export(GOLDENS / "untied", "q8_0", encode))
    with pytest.raises(ConfigError, match=r"in Q8_0: .* --again"):
        export(first, "q4_0", encode)
    second = written(tmp_path / "second.gguf", export(first, "q4_0", encode, again=True))
    assert read_gguf(second).tensors["blk.0.attn_q.weight"].format.name == "Q4_0"


def test_windows_that_a_file_cannot_tell_of_are_refused(folder_with: Callable[..., Path]) -> None:
    def windows(config: dict[str, object]) -> None:
        config |= {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
        config.pop("layer_types", None)

    with pytest.raises(UnsupportedModel, match="a GGUF file of qwen2 cannot say"):
        export(folder_with("qwen2", windows), "q8_0", encode)


def test_nothing_is_left_of_a_file_that_failed(tmp_path: Path) -> None:
    def fail(tensor: Tensor, format: Format) -> Tensor:
        raise KeyboardInterrupt

    (tmp_path / "model.gguf").write_text("before")
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "model.gguf", export(GOLDENS / "tied", "q8_0", fail))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("model.gguf", "before")]


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ModelError, match="1000 free"):
        written(tmp_path / "model.gguf", export(GOLDENS / "tied", "q8_0", encode))
    assert not list(tmp_path.iterdir())


def test_values_of_every_kind(tmp_path: Path) -> None:
    values = {"a": "ä", "b": True, "c": 7, "d": 0.5, "e": ["x", "yz"], "f": [1, -2], "g": [0.25], "h": []}
    write_gguf(tmp_path / "m.gguf", {key: encoded(value) for key, value in values.items()}, (), lambda *_: None)
    assert dict(read_gguf(tmp_path / "m.gguf").metadata) == values
