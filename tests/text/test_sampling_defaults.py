from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.text.sampling_defaults import (
    defaults_in_folder,
    defaults_in_metadata,
    defaults_in_modelfile,
    defaults_in_option,
)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 5},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"do_sample": True, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"temperature": None, "top_p": "much", "top_k": -5, "min_p": 0.1}, {"min_p": 0.1}),
        ({}, {}),
    ],
)
def test_a_folder_says_how_to_sample(tmp_path: Path, written: dict[str, Any], meant: dict[str, Any]) -> None:
    assert defaults_in_folder(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert defaults_in_folder(tmp_path) == meant


def test_a_gguf_file_says_how_to_sample() -> None:
    keys = {"temp": 0.5, "top_k": 30, "penalty_repeat": 1.2, "penalty_last_n": 64, "sequence": "kp", "top_p": 7.0}
    metadata = {f"general.sampling.{name}": value for name, value in keys.items()}
    assert defaults_in_metadata({"general.name": "x", **metadata}) == {
        "temperature": 0.5,
        "top_k": 30,
        "repetition_penalty": 1.2,
        "penalty_window": 64,
    }


def test_a_modelfile_says_how_to_sample() -> None:
    parameters = {"temperature": 0.1, "repeat_penalty": 1.3, "stop": ["a", "b"], "num_ctx": 512, "seed": 4}
    assert defaults_in_modelfile(parameters) == {
        "temperature": 0.1,
        "repetition_penalty": 1.3,
        "stop": ["a", "b"],
        "seed": 4,
    }


def test_an_option_names_defaults_as_json() -> None:
    given = '{"temperature": 0.8, "top_k": 40, "seed": 42, "max_tokens": 64}'
    assert defaults_in_option(given) == {"temperature": 0.8, "top_k": 40, "seed": 42, "max_tokens": 64}
    assert defaults_in_option("") == {}


@pytest.mark.parametrize("given", ["{", "[1]", '{"temperatur": 1}', '{"top_p": 2}', "0.8"])
def test_an_option_that_is_no_sampling_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="is not a JSON object of settings"):
        defaults_in_option(given)
