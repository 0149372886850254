"""The `penstock` object: what every answer can say about itself, and what it must say when fields were ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import ollama
import pytest

from penstock.engine.assemble import assemble
from penstock.ipc.inprocess import InProcessClient
from penstock.server.access.guard import Rules
from penstock.text.tool_formats import AnswerFormat, find_tool_format
from tests.server import toys

MODEL = "toy/parrot"
EXPLAIN = {"x-penstock-explain": "1"}
LONG = "a prompt that is longer than two blocks of sixteen. "


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 20} | fields


def complete(server: Any, prompt: str, **fields: Any) -> Any:
    answer = server.post("/v1/completions", model=MODEL, prompt=prompt, penstock=True, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["penstock"]["choices"][0]


def events(body: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


# -- every dialect ------------------------------------------------------------------------------------------------


def check(told: Any, *, finish: dict[str, Any]) -> None:
    assert (told["ignored_fields"], told["truncated_tokens"]) == ([], 0)
    (choice,) = told["choices"]
    assert choice["finish"] == finish
    assert choice["cache"]["prompt_tokens"] > choice["cache"]["reused_tokens"] >= 0
    assert set(choice["seconds"]) == {"queue", "prefill", "decode"}
    assert all(0 <= seconds < 30 for seconds in choice["seconds"].values())
    assert (choice["preemptions"], choice["recomputed_tokens"]) == (0, 0)


ENDED = {"reason": "stop", "by": "end_of_text", "token": toys.END, "text": "<end>"}


def test_openai(parrot: Any) -> None:
    completions = parrot.sdk().chat.completions
    check(completions.create(**chat("[hello]"), extra_headers=EXPLAIN).penstock, finish=ENDED)
    chunks = list(completions.create(**chat("[hello]"), stream=True, extra_body={"penstock": True}))
    assert [hasattr(chunk, "penstock") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    check(chunks[-1].penstock, finish=ENDED)
    assert chunks[-1].choices[0].finish_reason == "stop"
    usage = {"stream_options": {"include_usage": True}}
    *others, last = completions.create(**chat("[hello]"), stream=True, extra_headers=EXPLAIN, **usage)
    assert not any(hasattr(chunk, "penstock") for chunk in others)
    assert (last.choices, last.usage.completion_tokens) == ([], 6)
    check(last.penstock, finish=ENDED)


@pytest.mark.parametrize("usage", [False, True])
def test_each_choice_is_told_of(parrot: Any, usage: bool) -> None:
    asked = {"model": MODEL, "prompt": ["[one]", "[two]"], "n": 2}
    whole = parrot.sdk().completions.create(**asked, extra_headers=EXPLAIN).penstock
    options = {"stream_options": {"include_usage": True}} if usage else {}
    *others, last = parrot.sdk().completions.create(**asked, stream=True, extra_body={"penstock": True}, **options)
    assert not any(hasattr(chunk, "penstock") for chunk in others)
    for told in (whole, last.penstock):
        assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]


def test_responses(parrot: Any) -> None:
    responses = parrot.sdk().responses
    asked = {"model": MODEL, "input": "[hello]", "max_output_tokens": 20}
    check(responses.create(**asked, extra_headers=EXPLAIN).penstock, finish=ENDED)
    *others, last = responses.create(**asked, stream=True, extra_body={"penstock": True})
    assert not any(hasattr(getattr(event, "response", None), "penstock") for event in others)
    check(last.response.penstock, finish=ENDED)


def test_anthropic(parrot: Any) -> None:
    sdk = anthropic.Anthropic(base_url=parrot.url, api_key="none", max_retries=0)
    check(sdk.messages.create(**chat("[hello]"), extra_headers=EXPLAIN).penstock, finish=ENDED)
    streamed = sdk.messages.create(**chat("[hello]"), stream=True, extra_body={"penstock": True})
    told = {event.type: event for event in streamed if hasattr(event, "penstock")}
    assert told.keys() == {"message_delta"}
    check(told["message_delta"].penstock, finish=ENDED)


def test_ollama(parrot: Any) -> None:
    said = [{"role": "user", "content": "[hello]"}]
    for path, asked in (("/api/chat", {"messages": said}), ("/api/generate", {"prompt": "[hello]", "raw": True})):
        answer = parrot.http.post(path, json={"model": MODEL, **asked, "stream": False}, headers=EXPLAIN)
        check(answer.json()["penstock"], finish=ENDED)
        *others, last = map(json.loads, parrot.post(path, model=MODEL, penstock=True, **asked).text.splitlines())
        assert not any("penstock" in line for line in others)
        check(last["penstock"], finish=ENDED)
    client = ollama.Client(parrot.url, headers=EXPLAIN)
    assert client.chat(MODEL, said).message.content == "hello"  # whose client reads past it


def test_who_does_not_ask_is_not_told(parrot: Any) -> None:
    for headers in ({}, {"x-penstock-explain": "0"}):
        answer = parrot.http.post("/v1/chat/completions", json=chat("[hello]", penstock=None), headers=headers)
        assert "penstock" not in answer.json()
    refused = parrot.post("/v1/chat/completions", **chat("[hello]", penstock="yes"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "penstock")


# -- what is told -------------------------------------------------------------------------------------------------


def test_how_it_ended(parrot: Any) -> None:
    def finish(**fields: Any) -> Any:
        return complete(parrot, "[hello there]", **fields)["finish"]

    assert finish(max_tokens=3) == {"reason": "length", "by": "max_tokens"}
    assert finish(max_tokens=512 - len("[hello there]"), ignore_eos=True) == {"reason": "length", "by": "context"}
    assert finish(max_tokens=50, stop_token_ids=[ord("o")]) == {
        "reason": "stop",
        "by": "stop_token",
        "token": ord("o"),
        "text": "o",
    }


@pytest.mark.parametrize("fixture", ["parrot", "slow_parrot"])
def test_a_stop_string_ends_it_before_the_engine_does(fixture: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(fixture)
    told = complete(server, "[*again ]", stop="n a", max_tokens=200)
    assert told["finish"] == {"reason": "stop", "by": "stop_string", "text": "n a"}
    assert told["seconds"]["decode"] > 0
    server.until_idle()


def test_nothing_is_missed_where_all_was_reused(parrot: Any) -> None:
    complete(parrot, LONG + "[same]")
    cache = complete(parrot, LONG + "[same]")["cache"]
    assert cache == {"prompt_tokens": 58, "reused_tokens": 48, "reused_from": {"device": 48}, "miss": None}


def test_a_prompt_that_goes_on_where_another_ended(parrot: Any) -> None:
    turn = f"first {LONG}[hello]"
    complete(parrot, turn)
    cache = complete(parrot, f"{turn}hello and now for something completely different")["cache"]
    assert cache["reused_tokens"] == (len(turn) + len("hello")) // 16 * 16
    assert cache["miss"] is None


def test_where_a_prompt_left_the_last_one(parrot: Any) -> None:
    complete(parrot, f"second {LONG}Today is Monday. [x]{LONG}")
    miss = complete(parrot, f"second {LONG}Today is Tuesday. [x]{LONG}")["cache"]["miss"]
    at = len(f"second {LONG}Today is ")
    assert (miss["reason"], miss["position"]) == ("prompt_changed", at)
    assert miss["message"] == f"the prompt differs from a recent one at token {at}"
    assert (miss["after"], miss["expected"][:6], miss["got"][:7]) == ("oday is ", "Monday", "Tuesday")


def test_an_answer_that_came_back_changed(parrot: Any) -> None:
    turn = f"third {LONG}[what is said here is quite long]"
    complete(parrot, turn, max_tokens=60)
    miss = complete(parrot, f"{turn}what was said here, and so on")["cache"]["miss"]
    assert (miss["reason"], miss["position"]) == ("answer_changed", len(f"{turn}what "))
    assert (miss["expected"][:7], miss["got"][:8]) == ("is said", "was said")


def test_reasoning_that_a_template_drops(serve: Callable[..., Any]) -> None:
    class Thinker(toys.ToyText):
        format = AnswerFormat(find_tool_format(""), ("<think>", "</think>"))

    with serve(InProcessClient(toys.open_parrot), Thinker(), MODEL) as server:
        turn = f"fourth {LONG}[<think>let me see</think>hello, you]"
        complete(server, turn, max_tokens=60)
        miss = complete(server, f"{turn}hello, you. Once more")["cache"]["miss"]
        assert (miss["reason"], miss["position"]) == ("reasoning_dropped", len(turn))


def test_what_was_evicted(serve: Callable[..., Any]) -> None:
    limits = toys.LIMITS._replace(num_blocks=32)
    client = InProcessClient(lambda: assemble(toys.Parrot(limits), limits))  # type: ignore[arg-type]
    with serve(client, toys.ToyText(), MODEL) as server:
        complete(server, f"{LONG}[x]")
        for other in range(8):
            complete(server, f"{other} {LONG * 3}[x]")
        miss = complete(server, f"{LONG}[x]")["cache"]["miss"]
    assert (miss["reason"], miss["position"]) == ("evicted", 0)


def test_new_and_scored_prompts(parrot: Any) -> None:
    assert complete(parrot, f"\x01\x02 {LONG}[x]")["cache"]["miss"]["reason"] == "new"
    scored = complete(parrot, f"\x01\x02 {LONG}[x]", echo=True, logprobs=0)["cache"]
    assert (scored["reused_tokens"], scored["miss"]["reason"]) == (0, "scored")


def test_nobody_is_told_of_anothers_prompt(parrot: Any) -> None:
    secret = f"My password is {LONG}hunter2 {LONG}[x]"

    def ask(prompt: str, key: str) -> Any:
        asked = {"model": MODEL, "prompt": prompt, "penstock": True}
        answer = parrot.http.post("/v1/completions", json=asked, headers={"authorization": f"Bearer {key}"})
        return answer.json()["penstock"]["choices"][0]["cache"]["miss"]

    ask(secret, "one")
    assert ask(f"My password is {LONG}what? {LONG}[x]", "two")["reason"] == "new"
    assert ask(f"My password is {LONG}which? {LONG}[x]", "one")["expected"].startswith("hunter2")


# -- unknown fields -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lenient() -> Iterator[Any]:
    from tests.server.conftest import serving

    with serving(InProcessClient(toys.open_parrot), toys.ToyText(), MODEL, rules=Rules(lenient=True)) as server:
        yield server


def test_ignored_fields_are_listed(lenient: Any) -> None:
    said = {"role": "user", "content": "[hi]"}
    asked = {"model": MODEL, "messages": [said | {"mood": "good"}], "max_tokens": 9, "flavour": {"a": 1}}
    ours = {"modalities": ["audio"], "stream_options": {"include_usage": True, "colour": 1}, "stream": True}
    chunks = events(lenient.post("/v1/chat/completions", **asked, **ours).text)
    fields = ["flavour", "messages[].mood", "modalities", "stream_options.colour"]
    assert chunks[-1]["penstock"] == {"ignored_fields": fields, "truncated_tokens": 0}
    answer = lenient.post("/v1/messages", **asked, thinking={"type": "disabled", "depth": 3}).json()
    assert answer["penstock"]["ignored_fields"] == ["flavour", "messages[].mood", "thinking.depth"]
    options = {"num_predict": 9, "tfs_z": 0.5, "sparkle": True}
    del asked["max_tokens"]
    answer = lenient.post("/api/chat", **asked, options=options, stream=False).json()
    ignored = ["flavour", "messages[].mood", "options.sparkle", "options.tfs_z"]
    assert answer["penstock"]["ignored_fields"] == ignored


def test_ignored_fields_are_listed_in_a_header(lenient: Any) -> None:
    for streamed in (False, True):
        answer = lenient.post("/v1/chat/completions", **chat("[hi]", flavour=1, stream=streamed, modalities=["audio"]))
        assert answer.headers["x-penstock-ignored"] == "flavour, modalities"
    answer = lenient.post("/v1/chat/completions", **chat("[hi]", **{"a\r\nset-cookie: x": 1, "é": 2, "x" * 5000: 3}))
    assert "set-cookie" not in answer.headers
    assert answer.headers["x-penstock-ignored"] == f"a??set-cookie: x, {'x' * 128}, ?"
    many = {f"{index:03}{'y' * 200}": 1 for index in range(200)}
    assert len(lenient.post("/v1/chat/completions", **chat("[hi]", **many)).headers["x-penstock-ignored"]) < 1100


def test_unknown_fields_are_found_at_any_depth(lenient: Any) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "mood": 1}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x", "b": 1}]}
    said = {"role": "user", "content": [{"type": "input_text", "text": "[hi]", "cache_control": {}}]}
    answer = lenient.post("/v1/responses", model=MODEL, input=[call, output, said], text={"format": None, "size": 1})
    paths = ["input[].content[].cache_control", "input[].mood", "input[].output[].b", "text.size"]
    assert answer.json()["penstock"]["ignored_fields"] == paths
    tool = {"type": "function", "function": {"name": "f", "colour": 1}, "cache_control": {}}
    asked = chat("[hi]", tools=[tool], response_format={"type": "text", "json_schema": {"a": 1}})
    ignored = lenient.post("/v1/chat/completions", **asked).json()["penstock"]["ignored_fields"]
    assert ignored == ["response_format.json_schema.a", "tools[].cache_control", "tools[].function.colour"]


def test_a_setting_with_an_unknown_value_is_ignored_unless_it_is_needed(lenient: Any) -> None:
    answer = lenient.post("/v1/chat/completions", **chat("[hi]", service_tier="gold", flavour=1))
    assert answer.json()["penstock"]["ignored_fields"] == ["flavour", "service_tier"]
    answer = lenient.post("/v1/chat/completions", **chat("[hi]", response_format={"type": "yaml"}))
    assert (answer.status_code, "yaml" in answer.json()["error"]["message"]) == (400, True)


def test_nothing_is_said_where_nothing_was_ignored(lenient: Any) -> None:
    answer = lenient.post("/v1/completions", model=MODEL, prompt="[hi]")
    assert "penstock" not in answer.json()
    assert "x-penstock-ignored" not in answer.headers


def test_what_is_said_is_never_ignored(lenient: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": [image]}]}
    assert lenient.post("/v1/chat/completions", **asked).status_code == 400
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "[hi]", "images": ["aGk="]}]}
    assert lenient.post("/api/chat", **asked).status_code == 400


def test_what_is_ignored_is_bounded(lenient: Any) -> None:
    fields = {f"field{index}": 1 for index in range(257)}
    for given in (fields, {"structured_outputs": fields}, {"messages": [{"role": "user", "content": "x"} | fields]}):
        answer = lenient.post("/v1/chat/completions", **(chat("[hi]") | given))
        assert (answer.status_code, "more than 256 unknown fields" in answer.text) == (400, True)
    moods = [{"role": "user", "content": "[hi]", "mood": index} for index in range(20)]
    answer = lenient.post("/v1/chat/completions", **chat("") | {"messages": moods}).json()
    assert answer["penstock"]["ignored_fields"] == ["messages[].mood"]


def test_a_strict_server_refuses_what_others_ignore(strict_parrot: Any) -> None:
    assert strict_parrot.post("/v1/chat/completions", **chat("[hi]", flavour=1)).json()["error"]["param"] == "flavour"
