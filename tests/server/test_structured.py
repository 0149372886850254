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


@pytest.fixture(scope="module")
def server(smollm2: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    config = Config(model=str(smollm2), name=MODEL, max_len=512, max_rows=8)
    with serve(ProcessClient(config), load_text(smollm2), MODEL) as server:
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
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"guided_regex": "(?=a)b"}, "look-ahead"),
        ({"guided_grammar": "start: missing"}, "missing"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "only empty"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": False}, "no answer can match"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice"),
        ({"guided_regex": "a" * 2**21}, "guided_regex has 2097152 characters"),
    ],
    ids=["unsupported", "empty", "unknown", "regex", "lark", "choice", "empty choice", "json", "false", "both", "long"],
)
def test_what_cannot_be_honoured_is_a_400_by_name(server: Any, fields: dict[str, Any], said: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        server.sdk().chat.completions.create(**ask(), extra_body=fields, stream=stream)
    server.until_idle()


def test_logprobs_and_stop_strings_go_together_with_a_schema(server: Any) -> None:
    asked = ask(response_format=named(SCHEMAS["closed"]), logprobs=True, temperature=0)
    choice = server.sdk().chat.completions.create(**asked).choices[0]
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    stopped = server.sdk().chat.completions.create(**ask(response_format=named(SCHEMAS["closed"]), stop=["popul"]))
    assert stopped.choices[0].message.content.endswith('"')


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
