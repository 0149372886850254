"""Tools of responses that are not plain functions: they are flattened for the model, and calls are answered in the
tool's own kind. Tools that only a service can run are left out and listed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.ipc.inprocess import InProcessClient
from tests.server import toys

MODEL = "toy/hermes"
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": {"type": "text"}}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
AGENTS = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [LOOK | {"name": "spawn"}, PATCH]}
BUILT_IN = [{"type": "web_search", "external_web_access": True}, {"type": "image_generation"}, {"type": "mcp"}]

text = toys.Hermes("enable_thinking", "verbosity")


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Iterator[Any]:
    with serve(InProcessClient(lambda: toys.open_paced_parrot(0.0)), text, MODEL) as server:
        yield server


def spelled(answer: str) -> str:
    """A prompt to which the toy answers so."""
    return f"[={answer.encode().hex()}]"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def ask(server: Any, said: str, **fields: Any) -> Any:
    answer = server.post("/v1/responses", **{"model": MODEL, "input": spelled(said), "store": False} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def offered() -> list[str]:
    return [tool["function"]["name"] for tool in text.given["tools"]]


def test_tools_of_a_namespace_are_functions_whose_calls_name_it(server: Any) -> None:
    answer = ask(server, call("agents__spawn", task="a"), tools=[LOOK, AGENTS])
    assert offered() == ["look", "agents__spawn", "agents__apply_patch"]
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "spawn", "agents")
    assert json.loads(item["arguments"]) == {"task": "a"}
    assert answer["tools"] == [LOOK, AGENTS]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
    ask(server, "", tools=[AGENTS], input=[{"role": "user", "content": spelled("fine")}, item, result])
    _, called, told = text.given["messages"]
    assert called["tool_calls"][0]["function"]["name"] == "agents__spawn"
    assert (told["role"], told["name"], told["content"]) == ("tool", "agents__spawn", "done")


def test_a_namespace_of_functions_is_none(server: Any) -> None:
    brought = {"type": "additional_tools", "role": "developer", "tools": [AGENTS | {"name": "functions"}]}
    answer = ask(server, "", input=[brought, {"role": "user", "content": spelled(call("spawn"))}])
    assert offered() == ["spawn", "apply_patch"]
    assert (answer["output"][0]["name"], "namespace" in answer["output"][0]) == ("spawn", False)


@pytest.mark.parametrize("tool", [PATCH, AGENTS])
def test_a_custom_tool_takes_text(server: Any, tool: dict[str, Any]) -> None:
    name = "apply_patch" if tool is PATCH else "agents__apply_patch"
    answer = ask(server, call(name, input="*** Begin\nü"), tools=[tool])
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\nü")
    assert item.get("namespace") == (None if tool is PATCH else "agents")
    described = text.given["tools"][-1]["function"]
    assert described["description"].endswith("The input is plain text.")
    assert described["parameters"]["required"] == ["input"]
    assert "penstock" not in answer
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "patched"}
    ask(server, "", tools=[tool], input=[{"role": "user", "content": spelled("fine")}, item, result])
    _, called, told = text.given["messages"]
    assert called["tool_calls"][0]["function"] == {"name": name, "arguments": {"input": "*** Begin\nü"}}
    assert told["content"] == "patched"


def test_a_custom_call_is_streamed_with_its_own_events(server: Any) -> None:
    stream = server.sdk().responses.create(
        model=MODEL, input=spelled(call("apply_patch", input="a\nb")), tools=[PATCH], stream=True
    )
    events = list(stream)
    types = [event.type for event in events]
    assert types[2:6] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert (events[3].delta, events[4].input, events[5].item.input) == ("a\nb",) * 3


def test_a_custom_call_with_other_arguments_has_them_as_its_input(server: Any) -> None:
    (item,) = ask(server, call("apply_patch", patch="x"), tools=[PATCH])["output"]
    assert json.loads(item["input"]) == {"patch": "x"}


@pytest.mark.parametrize(
    ("written", "input"),
    [
        ('{"inp', ""),
        ('{"input": "', ""),
        (r'{"input": "a', "a"),
        ('{"input": "a\\', "a"),
        (r'{"input": "a\"b', 'a"b'),
        (r'{"input": "a\n\u00f', "a\n"),
        (r'{"input": "a\u00fc\\', "aü\\"),
        ('{"patch": "a', '{"patch": "a'),
    ],
)
def test_a_custom_call_that_is_cut_is_incomplete_and_has_its_input_so_far(
    server: Any, written: str, input: str
) -> None:
    said = f'<tool_call>{{"name": "apply_patch", "arguments": {written}'
    answer = ask(server, f"{said} and so on", tools=[PATCH], max_output_tokens=len(said))
    (item,) = answer["output"]
    assert (answer["status"], item["type"], item["status"]) == ("incomplete", "custom_tool_call", "incomplete")
    assert item["input"] == input


def test_the_clients_shell(server: Any) -> None:
    answer = ask(server, call("local_shell", command=["ls", "-l"], timeout_ms=5), tools=[{"type": "local_shell"}])
    (item,) = answer["output"]
    action = {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5}
    assert item["type"] == "local_shell_call"
    assert item["action"] == action | {"user": None, "working_directory": None}
    for result in ({"type": "function_call_output", "call_id": item["call_id"]}, {"type": "local_shell_call_output"}):
        given = {"id": item["call_id"], "output": "a.txt"} | result
        ask(server, "", input=[{"role": "user", "content": spelled("fine")}, item, given])
        _, called, told = text.given["messages"]
        assert called["tool_calls"][0]["function"]["arguments"] == {"command": ["ls", "-l"], "timeout_ms": 5}
        assert told["content"] == "a.txt"
    (item,) = ask(server, call("local_shell", cmd="ls"), tools=[{"type": "local_shell"}])["output"]
    assert json.loads(item["action"]["command"][0]) == {"cmd": "ls"}


def test_tools_that_a_service_runs_are_left_out_and_listed(server: Any) -> None:
    answer = ask(server, "hi", tools=[*BUILT_IN, LOOK], tool_choice={"type": "web_search"})
    assert offered() == ["look"]
    ignored = ["tool_choice", "tools[image_generation]", "tools[mcp]", "tools[web_search]"]
    assert answer["penstock"]["ignored_fields"] == ignored


def test_what_a_service_did_is_left_out_of_the_input_and_listed(server: Any) -> None:
    items: list[dict[str, Any]] = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA=not ours"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": spelled("hi")},
    ]
    answer = ask(server, "", input=items)
    assert answer["penstock"]["ignored_fields"] == ["input[].encrypted_content", "input[web_search_call]"]
    assert [message["content"] for message in text.given["messages"]] == ["No.", spelled("hi")]
    for needed in ({"type": "item_reference", "id": "x"}, {"type": "compaction", "encrypted_content": "x"}):
        assert server.post("/v1/responses", model=MODEL, input=[needed, *items]).status_code == 400


def test_an_image_that_a_tool_returned_is_named_and_one_that_a_user_sent_is_refused(server: Any) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    called = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Here"}, image]}
    said = {"role": "user", "content": spelled("hi")}
    answer = ask(server, "", input=[said, called, output])
    assert answer["penstock"]["ignored_fields"] == ["input[].output[input_image]"]
    assert text.given["messages"][-1]["content"].startswith("Here\n[The tool returned a part of type input_image")
    refused = server.post("/v1/responses", model=MODEL, input=[{"role": "user", "content": [image]}])
    assert refused.json()["error"]["param"] == "input[0].content[0].type"


def test_a_choice_among_tools_of_all_kinds(server: Any) -> None:
    listed = [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}]
    chosen = {"type": "allowed_tools", "mode": "auto", "tools": listed}
    ask(server, "hi", tools=[LOOK, PATCH], tool_choice=chosen)
    assert offered() == ["apply_patch"]


def test_what_codex_sends_beside(server: Any) -> None:
    fields = {
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"turn": "1"},
        "parallel_tool_calls": False,
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto", "context": "all_turns"},
    }
    answer = ask(server, "hi", **fields)
    assert answer["penstock"]["ignored_fields"] == ["reasoning.context"]
    assert (text.given["verbosity"], text.given["enable_thinking"]) == ("low", True)
