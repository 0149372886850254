"""KServe v2: health, metadata and Triton's generate extension."""

from __future__ import annotations

import json
from typing import Any

import pytest

MODEL = "/v2/models/toy/parrot"


def test_health_and_metadata(parrot: Any) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", f"{MODEL}/ready", f"{MODEL}/versions/1/ready"):
        assert parrot.get(path).status_code == 200
    assert parrot.get("/v2").json()["extensions"] == ["generate"]
    for path in (MODEL, f"{MODEL}/versions/1"):
        told = parrot.get(path).json()
        assert (told["name"], told["versions"]) == ("toy/parrot", ["1"])
        assert told["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    for path in ("/v2/models/other", "/v2/models/other/ready", f"{MODEL}/versions/2/ready"):
        answer = parrot.get(path)
        assert answer.status_code == 404
        assert isinstance(answer.json()["error"], str)


def test_generate(parrot: Any) -> None:
    answer = parrot.post(f"{MODEL}/generate", text_input="[hello]", id="7")
    told = {"model_name": "toy/parrot", "model_version": "1", "text_output": "[hello]hello", "id": "7"}
    assert answer.json() == told
    assert parrot.post(f"{MODEL}/versions/1/generate", text_input="[hello]", id="7").json() == told
    assert parrot.post(f"{MODEL}/versions/2/generate", text_input="[hello]").status_code == 404
    assert parrot.post("/v2/models/other/generate", text_input="[hello]").status_code == 404
    excluded = parrot.post(f"{MODEL}/generate", text_input="[hello]", exclude_input_in_output=True)
    assert excluded.json()["text_output"] == "hello"


def test_a_stream_has_what_is_new(parrot: Any) -> None:
    for path in (f"{MODEL}/generate_stream", f"{MODEL}/versions/1/generate_stream"):
        answer = parrot.post(path, text_input="[hey]", parameters={"stream": True})
        told = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
        assert "".join(each["text_output"] for each in told) == "hey"
        assert len(told) == 4
    whole = parrot.post(f"{MODEL}/generate_stream", text_input="[hey]", exclude_input_in_output=False)
    assert json.loads(whole.text.split("\n\n")[0].removeprefix("data: "))["text_output"] == "[hey]h"


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"max_tokens": 3}, "max_tokens", 3),
        ({"max_new_tokens": 3}, "max_tokens", 3),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 4}, "top_k", 4),
        ({"random_seed": 9}, "seed", 9),
        ({"seed": 9}, "seed", 9),
        ({"stop": ["x"]}, "stop", ("x",)),
        ({"stop_words": ["x", "y"]}, "stop", ("x", "y")),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
    ],
)
def test_sampling_may_be_in_three_places(watched_parrot: Any, given: dict[str, Any], name: str, value: Any) -> None:
    for body in (given, {"parameters": given}, {"sampling_parameters": json.dumps(given)}):
        answer = watched_parrot.post(f"{MODEL}/generate", text_input="[a]", **body)
        assert answer.status_code == 200, answer.text
        assert getattr(watched_parrot.requests[-1].sampling, name) == value


def test_parameters_count_more_and_the_default_length_is_tritons(watched_parrot: Any) -> None:
    watched_parrot.post(f"{MODEL}/generate", text_input="[a]", top_k=3, parameters={"top_k": 5})
    assert watched_parrot.requests[-1].sampling.top_k == 5
    assert watched_parrot.requests[-1].max_tokens == 16


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text_input": "[a]", "parameters": {"max_tokens": 0}},
        {"text_input": "[a]", "parameters": {"top_p": 7}},
        {"text_input": "[a]", "sampling_parameters": "{"},
        {"text_input": "[a]", "sampling_parameters": "[]"},
    ],
)
def test_what_cannot_be_done_is_refused(watched_parrot: Any, fields: dict[str, Any]) -> None:
    answer = watched_parrot.post(f"{MODEL}/generate", **fields)
    assert answer.status_code == 400
    assert isinstance(answer.json()["error"], str)


def test_what_is_not_done_is_listed(watched_parrot: Any) -> None:
    fields = {"return_context_logits": True, "odd": 1}
    answer = watched_parrot.post(f"{MODEL}/generate", text_input="[a]", **fields, parameters={"odder": 1}).json()
    assert answer["penstock"]["ignored_fields"] == ["odd", "parameters.odder", "return_context_logits"]
    assert "penstock" not in watched_parrot.post(f"{MODEL}/generate", text_input="[a]", stream=False).json()
