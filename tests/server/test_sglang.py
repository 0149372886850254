"""SGLang's routes: every field of /generate has an effect or is listed as ignored."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.server import toys


def generate(server: Any, text: Any = "[hello]", **fields: Any) -> Any:
    answer = server.post("/generate", text=text, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def sampled(server: Any, text: str = "[hello]", **params: Any) -> Any:
    return generate(server, text, sampling_params=params)


def events(answer: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_prompt_is_answered_with_one_object(parrot: Any) -> None:
    parrot.get("/flush_cache")
    answer = generate(parrot, rid="mine")
    assert (answer["text"], answer["output_ids"]) == ("hello", [*b"hello", toys.END])
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": toys.END},
        "prompt_tokens": 7,
        "completion_tokens": 6,
        "cached_tokens": 0,
        "weight_version": "default",
    }


def test_token_ids_are_a_prompt_too(parrot: Any) -> None:
    for ids in ([*b"[hello]"], [[*b"[hello]"]]):
        answer = parrot.post("/generate", input_ids=ids).json()
        assert (answer[0] if isinstance(ids[0], list) else answer)["text"] == "hello"


def test_lists_are_answered_with_lists(parrot: Any) -> None:
    answers = generate(
        parrot, ["[a]", "[bc]"], sampling_params=[{"max_new_tokens": 5}, {"max_new_tokens": 1}], rid=["x", "y"]
    )
    assert [answer["text"] for answer in answers] == ["a", "b"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    assert len(generate(parrot, ["[a]"])) == 1
    several = sampled(parrot, n=3)
    assert [answer["text"] for answer in several] == ["hello"] * 3


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"max_new_tokens": 2}, "he"),
        ({"stop": "l"}, "he"),
        ({"stop": ["lo", "x"]}, "hel"),
        ({"stop": "ll", "no_stop_trim": True}, "hell"),
        ({"stop_token_ids": [ord("o")]}, "hell"),
        ({"ignore_eos": True, "max_new_tokens": 7}, "hello"),
        ({"skip_special_tokens": False, "ignore_eos": True, "max_new_tokens": 6}, "hello<end>"),
    ],
)
def test_what_ends_an_answer_and_what_is_shown_of_it(parrot: Any, params: dict[str, Any], text: str) -> None:
    assert sampled(parrot, **params)["text"] == text


def test_a_length_is_a_finish_reason_with_its_length(parrot: Any) -> None:
    assert sampled(parrot, max_new_tokens=2)["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert sampled(parrot, stop="l")["meta_info"]["finish_reason"] == {"type": "stop", "matched": "l"}
    assert sampled(parrot, "[*a]")["meta_info"]["finish_reason"] == {"type": "length", "length": 128}


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 7}, "top_k", 7),
        ({"top_k": -1}, "top_k", 0),
        ({"min_p": 0.25}, "min_p", 0.25),
        ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ({"presence_penalty": 0.5}, "presence_penalty", 0.5),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"min_new_tokens": 3}, "min_tokens", 3),
        ({"sampling_seed": 11}, "seed", 11),
        ({"logit_bias": {"65": 1.5}}, "logit_bias", {65: 1.5}),
    ],
)
def test_sampling_reaches_the_engine(watched_parrot: Any, given: dict[str, Any], name: str, value: Any) -> None:
    answer = sampled(watched_parrot, **given)
    assert getattr(watched_parrot.requests[-1].sampling, name) == value
    assert "penstock" not in answer


@pytest.mark.parametrize(
    ("field", "kind", "text"),
    [
        ("json_schema", "rewritten_json", '{"type":"string"}'),
        ("regex", "regex", "h.*"),
        ("ebnf", "ebnf", 'root ::= "hello"'),
    ],
)
def test_grammars_are_asked_for_and_one_only(watched_parrot: Any, field: str, kind: str, text: str) -> None:
    refused = watched_parrot.post("/generate", text="[hello]", sampling_params={field: text})
    assert "started without a tokenizer" in refused.text  # the toy's engine has no grammars, and was asked for one
    grammar = watched_parrot.requests[-1].sampling.grammar
    assert (grammar.kind, grammar.text.replace(" ", "")) == (kind, text.replace(" ", ""))
    both = watched_parrot.post("/generate", text="[hello]", sampling_params={"regex": "h", "json_schema": "{}"})
    assert both.status_code == 400
    assert "cannot be combined" in both.text


def test_logprobs_begin_where_they_are_asked_for(parrot: Any) -> None:
    given = {"sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    meta = generate(parrot, "[hi]", **given)["meta_info"]
    assert meta["output_token_logprobs"] == [[-104 / 64, 104, None], [-105 / 64, 105, None]]
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta
    meta = generate(parrot, "[hi]", **given, logprob_start_len=2, top_logprobs_num=2, return_text_in_logprobs=True)[
        "meta_info"
    ]
    assert meta["input_token_logprobs"] == [[None, 105, "i"], [-93 / 64, 93, "]"]]
    assert meta["input_top_logprobs"] == [None, [[-93 / 64, 93, "]"], [-8.0, 65, "A"]]]
    assert meta["output_top_logprobs"][0] == [[-104 / 64, 104, "h"], [-8.0, 65, "A"]]
    whole = generate(parrot, "[hi]", **given, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in whole] == [*b"[hi]"]


def test_a_stream_has_the_whole_text_so_far(parrot: Any) -> None:
    told = events(parrot.post("/generate", text="[hey]", stream=True))
    assert [each["text"] for each in told] == ["h", "he", "hey", "hey"]
    assert [each["meta_info"]["finish_reason"] for each in told[:-1]] == [None] * 3
    assert told[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    several = events(parrot.post("/generate", text=["[ab]", "[c]"], stream=True))
    last = {each["index"]: each["text"] for each in several}
    assert last == {0: "ab", 1: "c"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "[a]", "input_ids": [1]}, "text"),
        ({"text": "[a]", "inputs": "[a]"}, "text"),
        ({"text": []}, "text"),
        ({"text": ["[a]", ""]}, "text"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [999]}, "input_ids"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "[a]", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"text": "[a]", "sampling_params": {"max_new_tokens": 9999}}, "max_tokens"),
        ({"text": "[a]", "return_logprob": True, "top_logprobs_num": 99}, "logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(parrot: Any, fields: dict[str, Any], param: str) -> None:
    answer = parrot.post("/generate", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_what_is_not_done_is_listed(watched_parrot: Any) -> None:
    fields = {"image_data": ["x"], "session_params": {"id": 1}, "return_hidden_states": True}
    answer = watched_parrot.post("/generate", text="[a]", sampling_params={"stop_regex": "b", "odd": 1}, **fields)
    assert answer.json()["penstock"]["ignored_fields"] == sorted(
        [*fields, "sampling_params.odd", "sampling_params.stop_regex"]
    )
    harmless = {"log_metrics": True, "sampling_params": {"spaces_between_special_tokens": False, "stream_interval": 2}}
    assert "penstock" not in watched_parrot.post("/generate", text="[a]", **harmless).json()


def test_priority_reaches_the_engine(watched_parrot: Any) -> None:
    generate(watched_parrot, priority=3)
    assert watched_parrot.requests[-1].priority == 3


# -- beside /generate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flushing_empties_the_prefix_cache(parrot: Any, method: str) -> None:
    prompt = "[" + "a" * 64 + "]"
    sampled(parrot, prompt, max_new_tokens=1)
    assert sampled(parrot, prompt, max_new_tokens=1)["meta_info"]["cached_tokens"] == 64
    assert parrot.http.request(method, "/flush_cache").status_code == 200
    assert sampled(parrot, prompt, max_new_tokens=1)["meta_info"]["cached_tokens"] == 0


def test_flushing_reaches_an_engine_process(parrot_process: Any) -> None:
    sampled(parrot_process, "[" + "a" * 64 + "]", max_new_tokens=1)
    parrot_process.until(lambda: parrot_process.client.stats.blocks_cached > 0)
    parrot_process.get("/flush_cache")
    parrot_process.until(lambda: parrot_process.client.stats.blocks_cached == 0)


def test_health_is_a_token_that_was_generated(parrot: Any, mortal_parrot: Any) -> None:
    before = parrot.client.stats.generated_tokens
    assert parrot.get("/health_generate").status_code == 200
    assert parrot.client.stats.generated_tokens == before + 1
    mortal_parrot.until(lambda: mortal_parrot.client.hello is not None)
    os.kill(mortal_parrot.client.hello.pid, signal.SIGKILL)
    mortal_parrot.until(lambda: mortal_parrot.client.hello is None)
    assert mortal_parrot.get("/health_generate").status_code == 503


def test_the_model_and_the_server_introduce_themselves(parrot: Any) -> None:
    for path in ("/get_model_info", "/model_info"):
        told = parrot.get(path).json()
        assert (told["model_path"], told["is_generation"]) == ("toy/parrot", True)
    for path in ("/get_server_info", "/server_info"):
        told = parrot.get(path).json()
        assert (told["served_model_name"], told["context_length"]) == ("toy/parrot", toys.LIMITS.max_len)
        assert told["max_total_num_tokens"] == toys.LIMITS.num_blocks * toys.LIMITS.block_size
        assert told["internal_states"][0]["num_running_reqs"] == 0


def test_encoding_returns_embeddings(parrot: Any) -> None:
    one = parrot.post("/encode", text="ab").json()
    same = parrot.post("/v1/embeddings", model="toy/parrot", input="ab").json()["data"][0]["embedding"]
    assert one["embedding"] == same
    assert one["meta_info"]["prompt_tokens"] == 2
    assert parrot.post("/encode", input_ids=[97, 98]).json()["embedding"] == same
    assert [each["embedding"] for each in parrot.post("/encode", text=["ab", "ab"]).json()] == [same, same]
    assert parrot.post("/encode").status_code == 400
