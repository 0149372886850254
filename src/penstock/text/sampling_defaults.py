"""Finds the sampling that applies where a request does not say: the model's own, as its files state it, or else one
that is the same for all models.

`run`, `chat`, `LLM`, the page and every HTTP dialect take it from here, so the same question has the same answer
wherever it is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, InvalidRequest
from penstock.text.hf_tokenizer import read_json
from penstock.types import SamplingParams

FALLBACK: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95}  # at 1.0 each, small models write nonsense

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GGUF_KEYS = {  # below general.sampling.
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
    """Returns defaults with what is given in their place. The fallback's temperature and top-p belong together: whoever
    gives a temperature gets no cut that was not asked for."""
    if not given:
        return defaults
    return dict(given) if defaults is FALLBACK and "temperature" in given else {**defaults, **given}


def defaults_in_folder(path: Path) -> dict[str, Any]:
    """Returns the sampling that generation_config.json of a Hugging Face folder asks for."""
    values = read_json(path / "generation_config.json")
    greedy = {"temperature": 0.0} if values.get("do_sample") is False else {}
    return _valid({name: values.get(name) for name in SAMPLING} | greedy)


def defaults_in_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling that a GGUF file asks for."""
    return _valid({name: metadata.get(f"general.sampling.{key}") for key, name in GGUF_KEYS.items()})


def defaults_in_modelfile(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling that the parameters of an Ollama Modelfile ask for."""
    return _valid({name: parameters.get(key) for key, name in MODELFILE_KEYS.items()})


def defaults_in_option(text: str) -> dict[str, Any]:
    """Returns the sampling that a JSON object asks for, with the names of SamplingParams; raises if it is not valid."""
    try:
        values = json.loads(text) if text else {}
        SamplingParams(**values)
    except (InvalidRequest, TypeError, ValueError) as error:
        raise ConfigError(
            f"the sampling {text!r} is not a JSON object of settings such as temperature and top_p: {error}"
        ) from error
    return dict(values)


def _valid(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what can be used: a model with an odd value in its files is run without it."""
    return {name: value for name, value in given.items() if value is not None and _is_valid(name, value)}


def _is_valid(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except (InvalidRequest, TypeError, ValueError):
        return False
    return True
