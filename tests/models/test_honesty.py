"""Every field and every tensor of every golden matters, or is known not to: whatever is changed, dropped or added is
named in an error, or, if it is a field that nothing is known of, among the unknown ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.backend.ref import RefBackend
from penstock.errors import ConfigError, MalformedFile, PenstockError, UnsupportedModel
from penstock.model.config_fields import CHANGING, NEUTRAL
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf.reader import read_gguf
from penstock.model.load import METADATA, load_model, open_checkpoint, read_fields
from penstock.model.names import Naming, identify
from penstock.model.registry import family_of_gguf, family_of_hf
from penstock.model.safetensors import read_safetensors
from tests.models.config_json import read_config

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(folder.name for folder in GOLDENS.iterdir())
ONE_FILE = [name for name in NAMES if (GOLDENS / name / "model.safetensors").exists()]
UNKNOWN = ({"unknown": 1}, -1, "unknown", [["unknown"]])
FIRST = {  # what is lacking first where one of these is
    "qkv": "q",
    "grouped_qkv": "q",
    "grouped_qkv.bias": "k.bias",
    "gate_up": "gate",
    "qkv.bias": "k.bias",
    "delta_qkvz": "delta_qkv",  # in other files
    "delta_ba": "delta_b",
    "decay": "decay_log",
    "kv_a": "k_rope",
    "kv_b": "k_b",
    "interleaved_transposed": "gate",
    "down_transposed": "down",
    "gate_up_transposed": "gate",
    "interleaved.bias": "gate.bias",
    "stream_in": "stream_in.0",
    "stream_out": "stream_out.0",
}
LEGAL = {("moe_layer_end_index", -1)}  # of UNKNOWN: it means the last layer


def config_of(golden: str) -> dict[str, Any]:
    return json.loads((GOLDENS / golden / "config.json").read_text())


def refused(config: dict[str, Any], key: str) -> bool:
    """With an error that names the field."""
    try:
        read_config(config)
    except PenstockError as error:
        return key in str(error)
    return False


@pytest.fixture
def neutral(monkeypatch) -> set[str]:
    """ConfigReader that say nothing about the computation: those of all families, and whatever a family says so of."""
    found = set(NEUTRAL)
    ignore = ConfigReader.ignore
    monkeypatch.setattr(ConfigReader, "ignore", lambda fields, *keys: found.update(keys) or ignore(fields, *keys))
    return found


@pytest.mark.parametrize("golden", NAMES)
def test_every_field_is_read_or_said_to_be_neutral(golden, neutral):
    config = config_of(golden)
    assert unknown_in(config) == []
    for key in config.keys() - neutral:
        wrong = [value for value in UNKNOWN if not (type(value) is int and (key, value) in LEGAL)]
        assert all(refused(config | {key: value}, key) for value in wrong), key
    for key in config.keys() & neutral:
        for value in UNKNOWN:
            read_config(config | {key: value})


@pytest.mark.parametrize("golden", NAMES)
def test_a_field_of_another_name_is_unknown(golden):
    config = config_of(golden)
    for key in config:
        assert unknown_in(config | {f"{key}_v2": 1}) == [f"{key}_v2"]


def unknown_in(config: dict[str, Any]) -> list[str]:
    reader = ConfigReader(config, "config.json")
    read_fields(reader)
    return reader.unknown


@pytest.mark.parametrize("key", CHANGING)
def test_what_is_known_to_change_the_numbers_is_read_or_refused_with_a_way_round(key):
    """In the family that reads fewest fields."""
    config = config_of("tied")
    if key in config:
        return
    for value in CHANGING[key]:
        assert unknown_in(config | {key: value}) == []
    for value in UNKNOWN:
        assert refused(config | {key: value}, key), value
    assert unknown_in(config | {key: None}) == []


def test_a_field_is_neutral_or_changes_the_numbers():
    assert not NEUTRAL & CHANGING.keys()


def test_fields_that_nothing_is_known_of(folder_with, monkeypatch):
    folder = folder_with("tied", config=lambda config: config.update(temperature=0.6, colour="red", mood=None))
    assert open_checkpoint(folder).unknown == ("colour",)
    with pytest.raises(UnsupportedModel, match="does not know: colour"):
        open_checkpoint(folder, strict=True)
    assert open_checkpoint(folder, ["colour=null"], strict=True).unknown == ()


def test_fields_can_be_changed(folder_with, goldens):
    folder = folder_with("mistral", config=lambda config: config.update(clip_qkv=8.0))
    with pytest.raises(UnsupportedModel, match=r"clip_qkv = 8\.0 in config\.json .* --config clip_qkv=null"):
        open_checkpoint(folder)
    found = open_checkpoint(folder, ["clip_qkv=null", "sliding_window=5", "rope_parameters.rope_theta=77.5"])
    assert (found.spec.attn.window, found.metadata["rope_parameters"]["rope_theta"]) == (5, 77.5)
    assert found.spec.attn.rope.inv_freq[1] == pytest.approx(77.5 ** (-2 / found.spec.attn.head_dim))
    for change, message in (
        ("clip_qkv", "takes KEY=VALUE; got 'clip_qkv'"),
        ("hidden_act=gelu", "hidden_act = 'gelu'"),
    ):
        with pytest.raises(PenstockError, match=message):
            open_checkpoint(folder, [change])
    with pytest.raises(ConfigError, match=r"model\.gguf is a file, which has none"):
        open_checkpoint(goldens / "tied" / "model.gguf", ["a=1"])


def tables(config: dict[str, Any], *path: str) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield (*path, key), value
            yield from tables(value, *path, key)


def with_value(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *others = path
    return config | {key: with_value(config[key], tuple(others), value) if others else value}


@pytest.mark.parametrize("golden", [name for name in NAMES if any(tables(config_of(name)))])
def test_the_same_of_nested_fields(golden):
    config = config_of(golden)
    for path, table in tables(config):
        for key in {*table, "unknown"}:
            assert refused(with_value(config, (*path, key), {"unknown": 1}), key), (path, key)


@pytest.mark.parametrize("golden", NAMES)
def test_every_key_of_a_file_is_read(golden):
    file = read_gguf(GOLDENS / golden / "model.gguf")
    metadata, arch = dict(file.metadata), file.metadata["general.architecture"]
    kind = family_of_gguf(ConfigReader(metadata, METADATA))
    for key in [*(key for key in metadata if key.startswith(f"{arch}.")), f"{arch}.unknown"]:
        for value in UNKNOWN:
            with pytest.raises(PenstockError, match=key):
                kind.read_gguf(ConfigReader(metadata | {key: value}, METADATA, f"{arch}."), file.tensors)


def load(path: Path) -> None:
    load_model(open_checkpoint(path), RefBackend())


def lacking(name: str, naming: Naming) -> str:
    """What an error says of a file without this tensor: what it lacks first of those that are in it, or that those
    beside it have no place now, where it decides on them."""
    wanted = identify(name, naming).name
    for whole, first in FIRST.items():
        if f".{wanted}".endswith(f".{whole}"):
            wanted = wanted.removesuffix(whole) + first
    return "'" + re.escape(wanted).replace(r"experts\.", r"experts\.(0\.)?") + "'|have no place"


def told_apart(names: list[str]) -> list[str]:
    """Without those of layers that are like another."""
    return [name for name in names if not any(f".{layer}." in name for layer in range(1, 9))]


@pytest.mark.parametrize("golden", ONE_FILE)
def test_every_missing_tensor_of_a_folder_is_named(golden, folder_with, tmp_path):
    naming = family_of_hf(ConfigReader(config_of(golden), "config")).HUGGING_FACE
    for name in told_apart(list(read_safetensors(GOLDENS / golden / "model.safetensors"))):
        folder = folder_with(golden, tensors=lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(MalformedFile, match=lacking(name, naming)):
            load(folder)
        folder.rename(tmp_path / name)


@pytest.mark.parametrize("golden", NAMES)
def test_every_missing_tensor_of_a_file_is_named(golden, gguf_with):
    file = read_gguf(GOLDENS / golden / "model.gguf")
    naming = family_of_gguf(ConfigReader(file.metadata, METADATA)).GGUF
    for name in told_apart(list(file.tensors)):
        if name == "output.weight" or naming.ignored.fullmatch(name):  # its absence says something
            continue
        wanted = f"'{name}'" if name == "token_embd.weight" else lacking(name, naming)
        with pytest.raises(MalformedFile, match=wanted):
            load(gguf_with(golden, tensors=lambda tensors, name=name: tensors.pop(name)))


@pytest.mark.parametrize("golden", ONE_FILE)
def test_surplus_tensors_are_named(golden, folder_with, gguf_with, tmp_path, floats):
    def added(name: str) -> Any:
        return lambda tensors: tensors.update({name: floats(4, 4)})

    for number, name in enumerate(("model.layers.0.unknown.weight", "unknown")):
        folder = folder_with(golden, tensors=added(name))
        with pytest.raises(UnsupportedModel, match=f"'{name}'"):
            load(folder)
        folder.rename(tmp_path / str(number))
    with pytest.raises(UnsupportedModel, match=r"'blk\.0\.unknown\.weight'"):
        load(gguf_with(golden, tensors=added("blk.0.unknown.weight")))
    with pytest.raises(MalformedFile, match=r"blk\.99\.ffn_down\.weight|'layers\.99\.down\.bias' is missing"):
        load(gguf_with(golden, tensors=added("blk.99.ffn_down.weight")))


def test_where_nothing_is_said_all_layers_have_a_bias_or_none(gguf_with, floats):
    with pytest.raises(MalformedFile, match=r"'layers\.1\.q\.bias' is missing"):
        load(gguf_with("tied", tensors=lambda tensors: tensors.update({"blk.0.attn_q.bias": floats(32)})))
