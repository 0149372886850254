"""Chooses the sampling for requests that do not specify it: the model's own, from its files, or else a common fallback.

`run`, `chat`, `LLM`, the page and all HTTP dialects use it, so they give the same answer to the same question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, InvalidRequest
from penstock.text.hf_tokenizer import read_json
from penstock.types import SamplingParams

FALLBACK: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95}  # at 1.0 each, small models produce nonsense

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GGUF_KEYS = {  # after general.sampling.
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "penalty_window",
}
MODELFILE_KEYS = {name: name for name in (*SAMPLING, "presence_penalty", "frequency_penalty", "seed", "stop")}
MODELFILE_KEYS |= {"repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_window"}


def with_given(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Overrides defaults. The fallback's temperature and top-p belong together, so a given temperature also removes the
    fallback's top-p.
    """
    if not given:
        return defaults
    return dict(given) if defaults is FALLBACK and "temperature" in given else {**defaults, **given}


def defaults_in_folder(path: Path) -> dict[str, Any]:
    """Returns the sampling in a Hugging Face folder's generation_config.json."""
    values = read_json(path / "generation_config.json")
    greedy = {"temperature": 0.0} if values.get("do_sample") is False else {}
    return _valid({name: values.get(name) for name in SAMPLING} | greedy)


def defaults_in_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return _valid({name: metadata.get(f"general.sampling.{key}") for key, name in GGUF_KEYS.items()})


def defaults_in_modelfile(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return _valid({name: parameters.get(key) for key, name in MODELFILE_KEYS.items()})


def defaults_in_option(text: str) -> dict[str, Any]:
    """Parses a JSON object of SamplingParams fields; raises if it is not valid."""
    try:
        values = json.loads(text) if text else {}
        SamplingParams(**values)
    except (InvalidRequest, TypeError, ValueError) as error:
        raise ConfigError(
            f"the sampling {text!r} is not a JSON object of settings such as temperature and top_p: {error}"
        ) from error
    return dict(values)


def _valid(given: Mapping[str, Any]) -> dict[str, Any]:
    """Drops invalid values, so that a model with an odd file still runs."""
    return {name: value for name, value in given.items() if value is not None and _is_valid(name, value)}


def _is_valid(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except (InvalidRequest, TypeError, ValueError):
        return False
    return True
