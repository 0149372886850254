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
