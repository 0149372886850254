"""Text Generation Inference's routes, with the client that Hugging Face wrote for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from tests.server import toys


@pytest.fixture(scope="module")
def client(parrot: Any) -> InferenceClient:
    return InferenceClient(parrot.url)


def events(answer: Any) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


# -- huggingface_hub ----------------------------------------------------------------------------------------------


def test_text(client: InferenceClient) -> None:
    assert client.text_generation("[hello]") == "hello"
    assert client.text_generation("[hello]", max_new_tokens=2) == "he"
    assert client.text_generation("[hello]", return_full_text=True) == "[hello]hello"
    assert client.text_generation("[hello]", stop=["l"]) == "hel"  # as there, with the stop sequence
    assert client.text_generation("x[hello]", truncate=6, return_full_text=True) == "x[hello]"


def test_details(client: InferenceClient) -> None:
    told = client.text_generation("[hi]", details=True, decoder_input_details=True, top_n_tokens=2)
    details = told.details
    assert details is not None
    assert (told.generated_text, details.finish_reason, details.generated_tokens) == ("hi", "eos_token", 3)
    assert [(each.id, each.text, each.special) for each in details.tokens] == [
        (104, "h", False),
        (105, "i", False),
        (toys.END, "<end>", True),
    ]
    assert details.tokens[0].logprob == -104 / 64
    assert details.top_tokens is not None
    assert [each["text"] for each in details.top_tokens[0]] == ["h", "A"]
    assert [(each.id, each.logprob) for each in details.prefill] == [(91, None), *((b, -b / 64) for b in b"hi]")]
    ended = client.text_generation("[hi]", details=True, max_new_tokens=1).details
    assert ended is not None
    assert (ended.finish_reason, ended.prefill) == ("length", [])
    stopped = client.text_generation("[hi]", details=True, stop=["i"]).details
    assert stopped is not None
    assert stopped.finish_reason == "stop_sequence"


def test_a_stream(client: InferenceClient) -> None:
    assert list(client.text_generation("[hey]", stream=True)) == ["h", "e", "y", "<end>"]
    told = list(client.text_generation("[hey]", stream=True, details=True, top_n_tokens=1))
    assert [each.index for each in told] == [1, 2, 3, 4]
    assert [each.generated_text for each in told] == [None, None, None, "hey"]
    last = told[-1]
    assert (last.token.special, last.details.generated_tokens, last.details.input_length) == (True, 4, 5)
    assert [each.text for each in told[0].top_tokens] == ["h"]
    held = list(client.text_generation("[hey]", stream=True, stop=["yx"]))
    assert "".join(held) == "hey"  # what was held back for the stop sequence is not lost


def test_best_of(client: InferenceClient) -> None:
    told = client.text_generation("[hi]", details=True, best_of=3, do_sample=True, seed=5)
    assert told.details is not None
    assert told.details.best_of_sequences is not None
    assert [each.generated_text for each in told.details.best_of_sequences] == ["hi", "hi"]
    assert sorted([told.details.seed, *(each.seed for each in told.details.best_of_sequences)]) == [5, 6, 7]


def test_errors(client: InferenceClient) -> None:
    for wrong in ({"max_new_tokens": 0}, {"best_of": 2}, {"top_p": 3.0}, {"truncate": 0}):
        with pytest.raises(ValidationError):
            client.text_generation("[hi]", **wrong)
    with pytest.raises(ValidationError):
        list(client.text_generation("[hi]", stream=True, best_of=2, do_sample=True))


def test_chats_whose_model_the_client_calls_by_a_name_of_its_own(watched_parrot: Any) -> None:
    client = InferenceClient(watched_parrot.url)
    asked = [{"role": "user", "content": "[hello]"}]
    assert client.chat_completion(asked).choices[0].message.content == "hello"
    chunks = client.chat_completion(asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"


# -- the routes themselves ----------------------------------------------------------------------------------------


def test_routes(parrot: Any) -> None:
    assert parrot.post("/generate", inputs="[hi]").json() == {"generated_text": "hi"}
    assert parrot.post("/", inputs="[hi]").json() == [{"generated_text": "hi"}]
    for answer in (
        parrot.post("/generate_stream", inputs="[hi]"),
        parrot.post("/generate", inputs="[hi]", stream=True),
        parrot.post("/", inputs="[hi]", stream=True),
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert events(answer)[-1]["generated_text"] == "hi"
    missing = parrot.post("/generate_stream")
    assert missing.status_code == 422
    assert missing.json()["error_type"] == "validation"
    assert parrot.get("/info").json()["model_id"] == "toy/parrot"
    assert parrot.get("/info").json()["max_total_tokens"] == toys.LIMITS.max_len


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({}, "temperature", 0.0),
        ({"temperature": 1.0}, "temperature", 0.0),  # the default there, where only do_sample turns sampling on
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_k": 3}, "top_k", 3),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ({"seed": 3}, "seed", 3),
        ({"max_new_tokens": 3}, "max_tokens", 3),
    ],
)
def test_parameters_reach_the_engine(watched_parrot: Any, given: dict[str, Any], name: str, value: Any) -> None:
    assert watched_parrot.post("/generate", inputs="[a]", parameters=given).status_code == 200
    assert getattr(watched_parrot.requests[-1].sampling, name) == value


def test_sampling_has_the_servers_own_temperature(watched_parrot: Any) -> None:
    watched_parrot.post("/generate", inputs="[a]", parameters={"do_sample": True})
    watched_parrot.post("/v1/completions", prompt="[a]")
    ours, openai = (request.sampling.temperature for request in watched_parrot.requests[-2:])
    assert ours == openai > 0


def test_typical_p_and_truncate(watched_parrot: Any) -> None:
    answer = watched_parrot.post("/generate", inputs="abc[a]", parameters={"typical_p": 0.5, "truncate": 3})
    request = watched_parrot.requests[-1]
    assert request.sampling.chain.typical_p == 0.5
    assert request.sampling.temperature > 0
    assert request.prompt == (*b"[a]",)
    assert answer.json()["penstock"]["truncated_tokens"] == 3


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"type": "json", "value": {"type": "object"}}, ("rewritten_json", '{"type": "object"}')),
        (
            {"type": "json_schema", "value": {"name": "x", "schema": {"type": "array"}}},
            ("rewritten_json", '{"type": "array"}'),
        ),
        ({"type": "regex", "value": "a+"}, ("regex", "a+")),
    ],
)
def test_grammars(watched_parrot: Any, given: dict[str, Any], grammar: tuple[str, str]) -> None:
    refused = watched_parrot.post("/generate", inputs="[a]", parameters={"grammar": given})
    assert "started without a tokenizer" in refused.text  # the toy's engine has no grammars, and was asked for one
    assert watched_parrot.requests[-1].sampling.grammar[:2] == grammar
    assert (
        watched_parrot.post(
            "/generate", inputs="[a]", parameters={"grammar": {"type": "regex", "value": 3}}
        ).status_code
        == 400
    )


def test_what_is_not_done_is_listed(watched_parrot: Any) -> None:
    answer = watched_parrot.post("/generate", inputs="[a]", parameters={"watermark": True, "odd": 1}).json()
    ignored = ["parameters.odd", "parameters.watermark"]
    assert answer["penstock"]["ignored_fields"] == ignored
    assert "penstock" not in watched_parrot.post("/generate", inputs="[a]", parameters={"watermark": False}).json()
