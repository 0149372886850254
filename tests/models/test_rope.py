"""Rotary frequencies of well-known models, against figures that transformers computed."""

from __future__ import annotations

import json

import pytest

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model import config_hf, rope
from penstock.model.config_reader import ConfigReader
from tests.models.config_json import read_config

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn"}

# name: base, dims, context before scaling, parameters, pairs, their frequencies, scale
KNOWN = {
    "Llama 3.1": (
        *(500000.0, 128, 8192, LLAMA3 | {"factor": 8.0}),
        *((0, 16, 32, 40, 63), (1.0, 0.037606031, 0.00052484602, 3.4281024e-05, 3.0689259e-07), 1.0),
    ),
    "Llama 3.2": (
        *(500000.0, 64, 8192, LLAMA3 | {"factor": 32.0}),
        *((0, 8, 16, 20, 31), (1.0, 0.037606031, 0.00042955671, 8.5702559e-06, 9.4183065e-08), 1.0),
    ),
    "yarn": (
        *(1e6, 128, 32768, YARN | {"factor": 4.0}),
        *((0, 16, 32, 40, 63), (1.0, 0.031622779, 0.00060294115, 4.4456985e-05, 3.1023444e-07), 1.138629436),
    ),
    "yarn, not truncated": (
        *(150000.0, 64, 4096, YARN | {"factor": 32.0, "truncate": False}),
        *((0, 8, 16, 20, 31), (1.0, 0.050813273, 0.00045648392, 1.8188337e-05, 3.0235114e-07), 1.346573590),
    ),
    "yarn, two scales": (
        *(10000.0, 64, 4096, YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}),
        *((0, 8, 16, 20, 31), (1.0, 0.1, 0.0055000004, 0.00079056941, 3.3338035e-06), 1.085726399),
    ),
    "yarn, one of two scales is 0": (
        *(10000.0, 64, 4096, YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.0}),
        *((0, 8, 16, 20, 31), (1.0, 0.1, 0.0055000004, 0.00079056941, 3.3338035e-06), 1.368887945),
    ),
    "yarn, scale given": (
        *(10000.0, 64, 4096, YARN | {"factor": 40.0, "attention_factor": 1.5}),
        *((0, 8, 16, 20, 31), (1.0, 0.1, 0.0055000004, 0.00079056941, 3.3338035e-06), 1.5),
    ),
    "yarn, factor from the lengths": (
        *(10000.0, 64, 4096, YARN | {"attention_factor": 1.5}),
        *((0, 8, 16, 20, 31), (1.0, 0.1, 0.0055000004, 0.00079056941, 3.3338035e-06), 1.5),
    ),
    "linear": (
        *(10000.0, 128, 4096, {"rope_type": "linear", "factor": 2.5}),
        *((0, 16, 32, 40, 63), (0.4, 0.04, 0.004, 0.0012649111, 4.6191279e-05), 1.0),
    ),
}


def read(parameters: dict[str, object], dims: int = 64, max_len: int = 163840) -> config_hf.RopeSpec:
    return config_hf.read_rope(ConfigReader({"rope_parameters": parameters}, "config.json"), dims, max_len)


@pytest.mark.parametrize("name", KNOWN)
def test_known_models(name):
    base, dims, original, parameters, pairs, freqs, scale = KNOWN[name]
    spec = read({"rope_theta": base, "original_max_position_embeddings": original, **parameters}, dims)
    assert len(spec.inv_freq) == dims // 2
    assert [spec.inv_freq[pair] for pair in pairs] == pytest.approx(freqs, rel=1e-6)
    assert spec.scale == pytest.approx(scale, rel=1e-6)


def test_a_factor_of_one_changes_nothing():
    freqs = rope.plain(10000.0, 64)
    assert rope.linear(freqs, 1.0) == freqs
    assert rope.llama3(freqs, 1.0, 1.0, 4.0, 8192) == pytest.approx(freqs)
    assert rope.yarn(freqs, 10000.0, 1.0, 4096, 32.0, 1.0, True) == pytest.approx(freqs)
    assert rope.yarn_scale(1.0) == 1.0


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, UnsupportedModel, "rope_type = 'longrope'"),
        ({"type": "dynamic", "factor": 2.0}, UnsupportedModel, "rope_type = 'dynamic'"),
        ({"rope_type": "default", "short_factor": [1.0]}, UnsupportedModel, "short_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor = 0.5"),
        ({"rope_type": 3}, MalformedFile, "rope_type in rope_parameters in config.json must be a string; got 3"),
        ({"rope_type": "linear"}, MalformedFile, "has no factor"),
        ({"rope_type": "linear", "factor": 0.0}, MalformedFile, "factor"),
        ({"rope_type": "linear", "factor": "2"}, MalformedFile, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, MalformedFile, "factor"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, MalformedFile, "truncate"),
        ({"rope_theta": 1.0}, MalformedFile, "rope_theta"),
        (LLAMA3 | {"factor": 2.0, "high_freq_factor": 0.9}, MalformedFile, "must not be above high_freq_factor"),
        ("yarn", MalformedFile, "must be an object"),
    ],
)
def test_what_cannot_be_computed_is_refused(parameters, error, message):
    with pytest.raises(error, match=message):
        read(parameters)


def test_older_configs_say_the_same(goldens):
    for folder in goldens.iterdir():
        config = json.loads((folder / "config.json").read_text())
        if "rope_theta" not in config.get("rope_parameters", {}):  # two ropes, or none
            continue
        wanted = read_config(config)
        scaling = config.pop("rope_parameters")
        config["rope_theta"] = scaling.pop("rope_theta")
        scaling["type"] = scaling.pop("rope_type")
        config["rope_scaling"] = None if scaling == {"type": "default"} else scaling
        assert read_config(config) == wanted
