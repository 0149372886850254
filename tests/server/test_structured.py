"""Structured output through the SDK: the default model, held to schemas it would not keep by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from penstock import LLM, SamplingParams
from penstock.config import Config
from penstock.ipc.spawn import ProcessClient
from penstock.model.load import load_text
from penstock.server.access.guard import Rules
from penstock.types import Grammar

MODEL = "smollm2"
NUMBER = {"type": "integer", "minimum": 1, "maximum": 99}
SCHEMAS: dict[str, dict[str, Any]] = {
    "closed": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "population": NUMBER},
        "required": ["city", "population"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 4},
    "reference": {
        "$defs": {"leaf": {"type": "object", "properties": {"n": NUMBER}, "required": ["n"], "maxProperties": 1}},
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
    "either": {"anyOf": [{"const": 'héllo "w"'}, {"type": "boolean"}, {"type": "null"}]},
    "pattern": {"type": "string", "pattern": "^[a-z]{2}-[0-9]{3}$"},
}


PAIR = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
NUMBER_TAG = {"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": {"enum": [7, 8]}}}
TAGGED = {"type": "structural_tag", "format": NUMBER_TAG | {"end": "</n>"}}


@pytest.fixture(scope="module")
def server(smollm2: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    config = Config(model=str(smollm2), name=MODEL, max_len=512, max_rows=8)
    with serve(ProcessClient(config), load_text(smollm2), MODEL, rules=Rules(lenient=False)) as server:
        yield server


def ask(**fields: Any) -> dict[str, Any]:
    question = {"role": "user", "content": "Tell me about a city, briefly."}
    return {"model": MODEL, "messages": [question], "max_tokens": 100, "seed": 5} | fields


def named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_answers_validate_streamed_and_whole_and_are_the_same(server: Any, schema: dict[str, Any]) -> None:
    asked = ask(response_format=named(schema), n=2, temperature=1.0)
    whole = server.sdk().chat.completions.create(**asked)
    texts = ["", ""]
    reasons = set()
    for chunk in server.sdk().chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons |= {choice.finish_reason}
    assert reasons == {None, "stop"}
    assert texts == [choice.message.content for choice in whole.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: Literal["small", "large"]
    rank: int = Field(ge=1, le=9)


def test_the_sdk_parses(server: Any) -> None:
    parsed = server.sdk().chat.completions.parse(**ask(response_format=Place)).choices[0].message.parsed
    assert parsed.size in ("small", "large")


def test_any_object(server: Any) -> None:
    asked = ask(response_format={"type": "json_object"}, max_tokens=60, temperature=0.7)
    choice = server.sdk().chat.completions.create(**asked).choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": r"\d{3}-\d{2}"}, r"\d{3}-\d{2}"),
        ({"guided_choice": ["yes", 'a "no"', "né\n"]}, 'yes|a "no"|né\n'),
        ({"guided_grammar": 'start: "a" | "b"'}, "a|b"),
        ({"guided_json": {"enum": [1, 2]}}, "1|2"),
        ({"guided_json": '{"enum": [3, 4]}'}, "3|4"),
        ({"structured_outputs": {"regex": "[ab]{7}"}}, "[ab]{7}"),
        ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
        ({"structured_outputs": {"json": {"const": "x"}}}, '"x"'),
        ({"structured_outputs": {"grammar": "start: /[0-9]/"}}, "[0-9]"),
        ({"structured_outputs": {"grammar": 'root ::= "g" [0-9]{2}'}}, "g[0-9]{2}"),
        ({"structured_outputs": {"structural_tag": TAGGED}}, "<n>[78]</n>"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGGED)}}, "<n>[78]</n>"),
        ({"structured_outputs": {"json": PAIR, "disable_any_whitespace": True}}, r"\[[12], [12]\]"),
        ({"structured_outputs": {"json": PAIR, "whitespace_pattern": "~"}}, r"\[~?[12]~?,~?[12]~?\]"),
        ({"structured_outputs": {"json": ONE, "disable_additional_properties": True}}, r'\{\s*"a"\s*:\s*1\s*\}'),
        ({"guided_json": PAIR, "guided_whitespace_pattern": "~"}, r"\[~?[12]~?,~?[12]~?\]"),
        ({"guided_grammar": 'root ::= "up" | "down"'}, "up|down"),
        ({"regex": "[xy]{4}"}, "[xy]{4}"),
        ({"ebnf": "root ::= 'e' [0-9]{1,3} \"!\""}, "e[0-9]{1,3}!"),
        ({"json_schema": '{"enum": [5, 6]}'}, "5|6"),
        ({"json_schema": {"enum": [5, 6]}}, "5|6"),
        ({"structural_tag": json.dumps(TAGGED)}, "<n>[78]</n>"),
        ({"grammar": 'root ::= "k" [a-c] # llama.cpp'}, "k[a-c]"),
        ({"grammar": "", "regex": "z"}, "z"),
        ({"response_format": {"type": "json_object", "schema": {"enum": [1, 2]}}}, "1|2"),
        ({"response_format": {"type": "json_schema", "schema": {"enum": [1, 2]}}}, "1|2"),
        ({"response_format": TAGGED}, "<n>[78]</n>"),
    ],
    ids=str,
)
def test_other_servers_names(server: Any, extra: dict[str, Any], pattern: str) -> None:
    chat = server.sdk().chat.completions.create(**ask(), extra_body=extra).choices[0]
    assert re.fullmatch(pattern, chat.message.content)
    assert chat.finish_reason == "stop"
    plain = server.sdk().completions.create(model=MODEL, prompt="Well,", max_tokens=30, extra_body=extra).choices[0]
    assert re.fullmatch(pattern, plain.text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": named({"type": "array", "uniqueItems": True})}, "uniqueItems"),
        ({"response_format": named({"type": "string", "format": "poem"})}, "format"),
        ({"response_format": named({"properties": {"a": {"not": {"pattern": "b"}}}})}, "not at properties.a"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "format must be an object"),
        ({"structural_tag": "[]"}, "structural_tag must be an object"),
        ({"grammar": "root ::= other"}, "'other' is not defined (line 1, column 10)"),
        ({"ebnf": 'root ::= ("a"'}, "does not close (line 1, column 10)"),
        ({"grammar_lazy": True}, "needs a grammar"),
        ({"grammar": "root ::= .", "grammar_lazy": True}, "takes 1 to 64 triggers"),
        ({"grammar": "root ::= .", "grammar_lazy": True, "grammar_triggers": [{"type": 9, "value": "a"}]}, "got 9"),
        ({"grammar": "root ::= .", "grammar_lazy": True, "grammar_triggers": [{"type": 0, "value": ""}]}, "token id"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"guided_regex": "(?=a)b"}, "look-ahead"),
        ({"guided_grammar": "start: missing"}, "missing"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "only empty"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": False}, "no answer can match"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice"),
        ({"guided_regex": "a" * 2**21}, "guided_regex has 2097152 characters"),
        ({"guided_regex": r"[^\s\S]"}, "no text matches it"),
        ({"guided_grammar": "start: A\nA: /a/ & /b/"}, "no text matches it"),
        ({"guided_grammar": 'start: "so" A\nA: /a/ & /b/'}, "no text matches it"),
        ({"grammar": "root ::= root"}, "no text matches it"),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
        ({"guided_json": {"allOf": [{"type": "string"}, {"type": "number"}]}}, "no value matches it"),
        ({"guided_regex": "ab", "bad_words": ["a", "ab"]}, "guided_regex and bad_words of this request exclude"),
        ({"allowed_token_ids": [5], "logit_bias": {"5": False}}, "allowed_token_ids and logit_bias"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty must be between 0.01 and 100"),
        ({"repeat_penalty": 1e-300}, "repeat_penalty must be between 0.01 and 100"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_cannot_be_honoured_is_a_400_by_name(server: Any, fields: dict[str, Any], said: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        server.sdk().chat.completions.create(**ask(), extra_body=fields, stream=stream)
    server.until_idle()


def test_an_answer_that_comes_to_a_dead_end_says_so_and_harms_no_other(server: Any) -> None:
    """The grammar asks for a letter that may not come."""
    server.sdk().chat.completions.create(**ask())
    fields = {"guided_regex": "ab", "bad_words": ["b", "ab"], "logprobs": True}  # with logprobs no token is forced
    with pytest.raises(openai.BadRequestError, match="guided_regex and bad_words of this request exclude") as refused:
        server.sdk().chat.completions.create(**ask(), extra_body=fields)
    assert "weights" not in str(refused.value)
    again = server.sdk().chat.completions.create(**ask(), extra_body={"penstock": True})
    assert again.usage.prompt_tokens_details.cached_tokens > 0, "the cached prefix was forgotten"


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_temperature_that_is_as_good_as_zero_is_zero(server: Any, temperature: float) -> None:
    greedy, cold = (
        server.sdk().chat.completions.create(**ask(max_tokens=8, temperature=each)).choices[0].message.content
        for each in (0, temperature)
    )
    assert cold == greedy


def test_logprobs_and_stop_strings_go_together_with_a_schema(server: Any) -> None:
    asked = ask(response_format=named(SCHEMAS["closed"]), logprobs=True, temperature=0)
    choice = server.sdk().chat.completions.create(**asked).choices[0]
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    stopped = server.sdk().chat.completions.create(**ask(response_format=named(SCHEMAS["closed"]), stop=["popul"]))
    assert stopped.choices[0].message.content.endswith('"')


# -- objects have the properties that their schemas list ----------------------------------------------------------

TEXT = {"type": "string", "maxLength": 20}
COUNTRY = {  # as in Ollama's documentation, with limits that end the strings and the list of a small model
    "type": "object",
    "properties": {"name": TEXT, "capital": TEXT, "languages": {"type": "array", "items": TEXT, "maxItems": 3}},
    "required": ["name", "capital", "languages"],
}
CANADA = "Tell me about Canada."
CANADA_CHAT = [{"role": "user", "content": CANADA}]
GREEDY = {"temperature": 0, "seed": 1}
DIALECTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], str]]] = {
    "ollama": (
        "/api/chat",
        {
            "model": MODEL,
            "messages": CANADA_CHAT,
            "format": COUNTRY,
            "stream": False,
            "options": GREEDY | {"num_predict": 300},
        },
        lambda told: told["message"]["content"],
    ),
    "openai": (
        "/v1/chat/completions",
        {"messages": CANADA_CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": COUNTRY}}},
        lambda told: told["choices"][0]["message"]["content"],
    ),
    "forced call": (
        "/v1/chat/completions",
        {"messages": CANADA_CHAT, "tool_choice": "required"}
        | {"tools": [{"type": "function", "function": {"name": "country", "parameters": COUNTRY}}]},
        lambda told: told["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"],
    ),
    "responses": (
        "/v1/responses",
        {"input": CANADA, "text": {"format": {"type": "json_schema", "name": "country", "schema": COUNTRY}}},
        lambda told: told["output"][0]["content"][0]["text"],
    ),
    "anthropic": (
        "/v1/messages",
        {"messages": CANADA_CHAT, "output_config": {"format": {"type": "json_schema", "schema": COUNTRY}}},
        lambda told: told["content"][0]["text"],
    ),
    "vllm": (
        "/v1/completions",
        {"prompt": CANADA, "guided_json": COUNTRY},
        lambda told: told["choices"][0]["text"],
    ),
    "vllm, structured outputs": (
        "/v1/completions",
        {"prompt": CANADA, "structured_outputs": {"json": COUNTRY, "disable_additional_properties": False}},
        lambda told: told["choices"][0]["text"],
    ),
    "llama.cpp": (
        "/completion",
        {"prompt": CANADA, "json_schema": COUNTRY, "n_predict": 300, "temperature": 0},
        lambda told: told["content"],
    ),
    "tgi": (
        "/",
        {"inputs": CANADA, "parameters": {"grammar": {"type": "json", "value": COUNTRY}, "max_new_tokens": 300}},
        lambda told: told[0]["generated_text"],
    ),
    "sglang": (
        "/generate",
        {"text": CANADA, "sampling_params": {"json_schema": json.dumps(COUNTRY), "max_new_tokens": 300, **GREEDY}},
        lambda told: told["text"],
    ),
}


@pytest.mark.parametrize(("path", "fields", "text_of"), DIALECTS.values(), ids=DIALECTS.keys())
def test_objects_are_closed_in_every_dialect(
    server: Any, path: str, fields: dict[str, Any], text_of: Callable[[Any], str]
) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    common = {"model": MODEL, "temperature": 0, limit: 300} if path.startswith("/v1/") else {}
    answer = server.post(path, **common, **fields)
    assert answer.status_code == 200, answer.text
    assert list(json.loads(text_of(answer.json()))) == ["name", "capital", "languages"]


# -- the grammars of custom tools ---------------------------------------------------------------------------------

PATCH = r"""
start: "*** Begin Patch" LF line~1..2 "*** End Patch"
line: "+" /[^\n]{1,9}/ LF
%import common.LF
"""
INPUTS = {
    "lark": ({"syntax": "lark", "definition": PATCH}, r"\*\*\* Begin Patch\n(\+[^\n]{1,9}\n)+\*\*\* End Patch"),
    "regex": ({"syntax": "regex", "definition": r'^"[a-z]{3}/\\"$'}, r'"[a-z]{3}/\\"'),
}


@pytest.mark.parametrize(("format", "pattern"), INPUTS.values(), ids=INPUTS.keys())
def test_the_input_of_a_custom_tool_matches_its_grammar(server: Any, format: dict[str, str], pattern: str) -> None:
    tool = {"type": "custom", "name": "edit", "format": {"type": "grammar"} | format}
    asked = {"model": MODEL, "input": "Change a line.", "tools": [tool], "tool_choice": "required", "temperature": 0.9}
    answer = server.post("/v1/responses", **asked, max_output_tokens=300, seed=3).json()
    item = answer["output"][0]
    assert (item["type"], item["status"]) == ("custom_tool_call", "completed")
    assert re.fullmatch(pattern, item["input"]), item["input"]
    assert "penstock" not in answer
    free = server.post("/v1/responses", **asked | {"tool_choice": "auto"}, max_output_tokens=8)
    assert free.status_code == 200, free.text


@pytest.mark.parametrize(
    ("format", "said"),
    [
        ({"syntax": "bnf", "definition": "x"}, "tools[0].format.syntax is 'lark' or 'regex'; got 'bnf'"),
        ({"syntax": "lark"}, "tools[0].format.definition' is missing"),
        ({"syntax": "lark", "definition": "start: missing"}, "missing"),
        ({"syntax": "lark", "definition": "start: A\nA: /a/ & /b/"}, "no text matches it"),
        ({"syntax": "lark", "definition": "start: <|im_end|>"}, "leave out '<|im_end|>'"),
    ],
)
def test_a_custom_tools_grammar_that_cannot_be_used_is_a_400(server: Any, format: dict[str, str], said: str) -> None:
    tool = {"type": "custom", "name": "edit", "format": {"type": "grammar"} | format}
    refused = server.post("/v1/responses", model=MODEL, input="Go.", tools=[tool], tool_choice="required")
    assert refused.status_code == 400, refused.text
    assert said in refused.json()["error"]["message"]


def test_costs_are_counted(server: Any) -> None:
    server.sdk().chat.completions.create(**ask(response_format=named(SCHEMAS["closed"])))
    told = dict(line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines() if line[0] != "#")
    for name in ("grammars", "grammar_compile_seconds", "grammar_masks", "grammar_mask_seconds", "forced_tokens"):
        assert float(told[f"penstock_{name}_total"]) > 0


def test_in_a_script(smollm2: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, grammar=Grammar("regex", r"[A-Z][a-z]{3}: \d\d"))
    with LLM(smollm2, max_len=128, max_rows=2) as llm:
        (answer,) = llm.generate("The year was", params)
    assert re.fullmatch(r"[A-Z][a-z]{3}: \d\d", answer.text)
    assert answer.finish_reason == "stop"


# -- grammars that wait for a trigger -----------------------------------------------------------------------------

LAZY = {"grammar": 'root ::= " people" " END"', "grammar_lazy": True}
TRIGGERS = {
    "word": [{"type": "word", "value": " people"}],
    "number": [{"type": 1, "value": " people"}],
    "pattern": [{"type": 2, "value": "( peo)ple"}],
    "full": [{"type": "pattern_full", "value": r"[\s\S]*( people)"}],
}


@pytest.mark.parametrize("triggers", TRIGGERS.values(), ids=TRIGGERS.keys())
def test_a_lazy_grammar_applies_from_its_trigger_on(server: Any, triggers: list[dict[str, Any]]) -> None:
    asked: Any = {"model": MODEL, "prompt": "Paris is", "max_tokens": 20, "temperature": 0}
    free = server.post("/v1/completions", **asked).json()["choices"][0]["text"]
    assert " people" in free
    assert "END" not in free
    held = server.post("/v1/completions", **asked, **LAZY, grammar_triggers=triggers).json()["choices"][0]
    assert held["text"] == free[: free.index(" people")] + " people END"
    assert held["finish_reason"] == "stop"


def test_a_token_triggers_a_lazy_grammar(server: Any) -> None:
    (token,) = server.post("/tokenize", prompt=" people", add_special_tokens=False).json()["tokens"]
    asked: Any = {"model": MODEL, "prompt": "Paris is", "max_tokens": 20, "temperature": 0}
    triggers = [{"type": 0, "value": " people", "token": token}]
    held = server.post("/v1/completions", **asked, **LAZY, grammar_triggers=triggers).json()["choices"][0]
    assert held["text"].endswith(" people END")


# -- keywords that no grammar enforces ----------------------------------------------------------------------------

FIVE = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
NEVER = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}


@pytest.fixture(scope="module")
def lenient(smollm2: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    config = Config(model=str(smollm2), name=MODEL, max_len=512, max_rows=4)
    with serve(ProcessClient(config), load_text(smollm2), MODEL, rules=Rules(lenient=True)) as server:
        yield server


def held_to(schema: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    format = named(schema)
    format["json_schema"]["strict"] = strict
    return ask(response_format=format)


def test_an_answer_that_fails_a_check_is_tried_again(lenient: Any) -> None:
    """What is returned passes, or its keyword is named; some answers of several seeds need another attempt."""
    before = requests_of(lenient)
    for seed in range(6):
        answer = lenient.post("/v1/chat/completions", **(held_to(FIVE) | {"seed": seed, "temperature": 1.0})).json()
        values = json.loads(answer["choices"][0]["message"]["content"])
        failed = answer.get("penstock", {}).get("ignored_fields", [])
        assert failed == ([] if len(set(values)) == 2 else ["response_format.json_schema.schema.uniqueItems"])
    assert requests_of(lenient) > before + 6


def test_a_greedy_answer_repeats_although_it_is_tried_again(lenient: Any) -> None:
    """Ten different digits from 1 to 9 do not exist, so every attempt fails."""
    digits = {"type": "array", "items": {"enum": [*range(1, 10)]}, "minItems": 10, "maxItems": 10, "uniqueItems": True}
    asked = held_to(digits) | {"temperature": 0.0}
    asked.pop("seed", None)
    before = requests_of(lenient)
    answers = [lenient.post("/v1/chat/completions", **asked).json()["choices"][0]["message"] for _ in range(3)]
    assert requests_of(lenient) == before + 9
    assert answers[1:] == answers[:1] * 2


def requests_of(server: Any) -> float:
    """How many requests the engine has finished."""
    told = dict(line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines() if line[0] != "#")
    return sum(float(count) for name, count in told.items() if name.startswith("penstock_requests_finished_total"))


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_answer_failed_is_named(lenient: Any, stream: bool) -> None:
    answer = lenient.post("/v1/chat/completions", **held_to(NEVER), stream=stream)
    last = json.loads(answer.text.strip().split("\n\n")[-2][6:]) if stream else answer.json()
    assert last["penstock"]["ignored_fields"] == ["response_format.json_schema.schema.uniqueItems"]


def test_what_cannot_be_checked_is_named(lenient: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "poem", "maxLength": 5}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    answer = lenient.post("/v1/chat/completions", **held_to(schema)).json()
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), schema)
    assert answer["penstock"]["ignored_fields"] == ["response_format.json_schema.schema.properties.a.format"]


def test_a_strict_schema_is_guaranteed_or_refused_and_closed(lenient: Any) -> None:
    refused = lenient.post("/v1/chat/completions", **held_to(FIVE, strict=True))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format.json_schema.schema"
    assert "uniqueItems" in refused.json()["error"]["message"]
    answer = lenient.post("/v1/chat/completions", **held_to(ONE, strict=True)).json()
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1}


def test_tools_name_what_their_schemas_cannot_be_held_to(lenient: Any) -> None:
    parameters = {"type": "object", "properties": {"ids": FIVE}, "required": ["ids"]}
    tool = {"type": "function", "function": {"name": "take", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "take"}}
    answer = lenient.post("/v1/chat/completions", **ask(tools=[tool], tool_choice=choice)).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert len(json.loads(call["function"]["arguments"])["ids"]) == 2
    assert answer["penstock"]["ignored_fields"] == ["tools[].parameters.properties.ids.uniqueItems"]
    tool["function"]["strict"] = True  # type: ignore[index]
    refused = lenient.post("/v1/chat/completions", **ask(tools=[tool], tool_choice=choice))
    assert refused.status_code == 400
    assert "uniqueItems at properties.ids" in refused.json()["error"]["message"]
