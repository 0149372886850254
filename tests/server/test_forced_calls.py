"""tool_choice, enforced: the default model, which knows no tools, calls the ones it must."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest

from penstock.config import Config
from penstock.ipc.spawn import ProcessClient
from penstock.model.load import load_text

MODEL = "smollm2"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["zone"]}
SCHEMAS = {"get_weather": CITY, "get_time": TIME | {"additionalProperties": False}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]


@pytest.fixture(scope="module")
def server(smollm2: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    config = Config(model=str(smollm2), name=MODEL, max_len=1024, max_rows=4)
    with serve(ProcessClient(config), load_text(smollm2), MODEL) as server:
        yield server


NAMED = {"type": "function", "function": {"name": "get_time"}}
LISTED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", set(SCHEMAS)),
        (NAMED, {"get_time"}),
        ({"type": "allowed_tools", "allowed_tools": LISTED}, {"get_weather"}),
    ],
    ids=["required", "named", "allowed"],
)
def test_a_forced_call(server: Any, choice: Any, names: set[str]) -> None:
    question = {"role": "user", "content": "Say hello."}
    asked = {"model": MODEL, "messages": [question], "tools": TOOLS, "tool_choice": choice, "seed": 3}
    asked |= {"parallel_tool_calls": False, "max_tokens": 100}
    whole = server.sdk().chat.completions.create(**asked).choices[0]
    with server.sdk().chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    (call,), (same,) = whole.message.tool_calls, streamed.message.tool_calls
    assert whole.message.content is None
    assert call.function.name in names
    assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_strict_calls_are_held_without_being_forced(server: Any) -> None:
    """The bias makes the model begin a call; what it is of is the grammar's."""
    (likely, *_) = server.post("/tokenize", prompt='{"').json()["tokens"]
    tools: Any = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "tools": tools}
    asked |= {"parallel_tool_calls": False, "max_tokens": 100, "seed": 3}
    choice = server.sdk().chat.completions.create(**asked, logit_bias={str(likely): 100}).choices[0]
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    free = server.sdk().chat.completions.create(**asked).choices[0]
    assert free.message.content
    assert not free.message.tool_calls


PLACE = {"type": "object", "properties": {"place": {"enum": ["here", "there"]}}, "required": ["place"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE | {"additionalProperties": False}}}


@pytest.mark.parametrize("beginning", ['{"name', '{"place'])
def test_calls_or_an_answer_in_its_format(server: Any, beginning: str) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "tools": TOOLS, "seed": 3}
    asked |= {"parallel_tool_calls": False, "max_tokens": 100, "response_format": FORMAT}
    likely = server.post("/tokenize", prompt=beginning, add_special_tokens=False).json()["tokens"]
    choice = server.sdk().chat.completions.create(**asked, logit_bias={str(id): 100 for id in likely}).choices[0]
    if beginning == '{"place':
        assert json.loads(choice.message.content)["place"] in ("here", "there")
    else:
        (call,) = choice.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_time"}], ids=["any", "tool"])
def test_a_forced_use_in_anthropics_words(server: Any, choice: Any) -> None:
    sdk = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 100}
    choice |= {"disable_parallel_tool_use": True}
    message = sdk.messages.create(**asked, tools=tools, tool_choice=choice)
    (use,) = message.content
    assert (use.type, message.stop_reason) == ("tool_use", "tool_use")
    assert use.name == choice.get("name", use.name)
    jsonschema.validate(use.input, SCHEMAS[use.name])


REPEATED = {"role": "user", "content": "What time is it, and how is the weather? Call the tools again and again."}
OPEN = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_choice_is_one_call_and_required_ones_do_not_repeat(server: Any, stream: bool) -> None:
    """The default allows calls in parallel, and small models never end."""
    for choice in (NAMED, "required"):
        asked: Any = {"model": MODEL, "messages": [REPEATED], "tools": TOOLS, "tool_choice": choice, "temperature": 0}
        answer = server.post("/v1/chat/completions", **asked, max_tokens=300, stream=stream)
        message, reason = joined(answer.text) if stream else whole(answer.json())
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        assert not message["content"]
        assert len(set(calls)) == len(calls)
        assert reason == "tool_calls"
        if choice is NAMED:
            assert len(calls) == 1
    server.until_idle()


def whole(answer: dict[str, Any]) -> tuple[dict[str, Any], str]:
    return answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]


def joined(events: str) -> tuple[dict[str, Any], str]:
    """The message that a stream comes to, and how it ended."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = None
    for line in events.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append(call)
                else:
                    message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return message, str(reason)


def test_a_forced_call_that_is_cut_off_leaves_no_content(server: Any) -> None:
    asked: Any = {"model": MODEL, "messages": [REPEATED], "tools": TOOLS, "tool_choice": NAMED}
    message, reason = whole(server.post("/v1/chat/completions", **asked, max_tokens=4).json())
    assert (message["content"], message.get("tool_calls"), reason) == ("", None, "length")


def test_what_instructor_sends(server: Any) -> None:
    """Its default mode names one function whose schema is open; small models never end an open object."""
    function = {"name": "Person", "description": "Correctly extracted `Person`", "parameters": OPEN}
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Extract: Ann is 30 years old."}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "Person"}},
    }
    message, reason = whole(server.post("/v1/chat/completions", **asked, max_tokens=200).json())
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], reason) == ("Person", "tool_calls")
    jsonschema.validate(json.loads(call["function"]["arguments"]), OPEN | {"additionalProperties": False})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_time"}], ids=["any", "tool"])
def test_uses_do_not_repeat_in_anthropics_words(server: Any, choice: Any) -> None:
    sdk = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    asked: Any = {"model": MODEL, "messages": [REPEATED], "max_tokens": 300, "tools": tools, "tool_choice": choice}
    message = sdk.messages.create(**asked, extra_body={"temperature": 0})
    assert {use.type for use in message.content} == {"tool_use"}
    uses = [(use.name, json.dumps(use.input)) for use in message.content if use.type == "tool_use"]
    assert len(set(uses)) == len(uses)
    assert message.stop_reason == "tool_use"
    if choice["type"] == "tool":
        assert len(uses) == 1
