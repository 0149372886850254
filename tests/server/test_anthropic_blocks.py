"""Blocks and tools that Anthropic's clients send: read as text, flattened to functions, left out and listed, or
refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.ipc.inprocess import InProcessClient
from penstock.server.access.guard import Rules
from penstock.server.chat.chat_turn import late_system_as_user
from penstock.text import ChatPrompt
from tests.server import toys

MODEL = "toy/hermes"
SAID: dict[str, Any] = {"role": "user", "content": "[hi]"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
NOTE = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It rains."}}
FOUND = {"type": "search_result", "source": "http://x", "title": "X", "content": [{"type": "text", "text": "Sun."}]}
CACHED = {"cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}

text = toys.Hermes("enable_thinking")


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Iterator[Any]:
    with serve(InProcessClient(lambda: toys.open_paced_parrot(0.0)), text, MODEL) as server:
        yield server


@pytest.fixture(scope="module")
def strict(serve: Callable[..., Any]) -> Iterator[Any]:
    with serve(InProcessClient(toys.open_parrot), text, MODEL, rules=Rules(lenient=False)) as server:
        yield server


def send(server: Any, *messages: dict[str, Any], **fields: Any) -> Any:
    return server.post("/v1/messages", model=MODEL, max_tokens=50, messages=list(messages), **fields)


def ignored(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    named: list[str] = answer.json().get("penstock", {}).get("ignored_fields", [])
    return named


def contents() -> list[str]:
    return [message["content"] for message in text.given["messages"]]


def result(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    told = {"type": "tool_result", "tool_use_id": "t1", "content": list(blocks), **CACHED}
    return [SAID, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [told]}]


def test_documents_and_search_results_are_text(strict: Any) -> None:
    blocks = [NOTE | {"title": "Weather", "context": "Today", **CACHED}, FOUND, {"type": "text", "text": "[hi]"}]
    assert ignored(send(strict, {"role": "user", "content": blocks})) == []
    assert contents() == ["Weather\nToday\nIt rains.\nX (http://x)\nSun.\n[hi]"]
    inner = {"type": "content", "content": [{"type": "text", "text": "A", **CACHED}, {"type": "text", "text": "B"}]}
    send(strict, {"role": "user", "content": [{"type": "document", "source": inner}]}, SAID)
    assert contents()[0] == "A\nB"
    assert ignored(send(strict, *result(NOTE, FOUND))) == []
    assert contents()[-1] == "It rains.\nX (http://x)\nSun."


@pytest.mark.parametrize("block", [IMAGE, PDF, {"type": "container_upload", "file_id": "f"}, {"type": "video"}])
def test_what_a_user_sent_is_refused_if_it_cannot_be_read(server: Any, block: dict[str, Any]) -> None:
    answer = send(server, {"role": "user", "content": [{"type": "text", "text": "[hi]"}, block]})
    assert answer.status_code == 400
    assert "messages[0].content[1].type" in answer.json()["error"]["message"]


def test_what_a_tool_returned_is_named_if_it_cannot_be_read(server: Any, strict: Any) -> None:
    listed = ["messages[].content[].content[document from base64]", "messages[].content[].content[image]"]
    answer = send(server, *result({"type": "text", "text": "Here:"}, IMAGE, PDF))
    assert ignored(answer) == listed
    first, second, third = contents()[-1].split("\n")
    assert (first, "type image" in second, "type document" in third) == ("Here:", True, True)
    assert send(strict, *result(IMAGE)).status_code == 400


def test_what_a_service_did_in_an_answer_is_left_out_and_listed(server: Any, strict: Any) -> None:
    searched = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Sun."},
    ]
    answer = send(server, SAID, {"role": "assistant", "content": searched}, SAID)
    assert ignored(answer) == ["messages[].content[redacted_thinking]", "messages[].content[server_tool_use]"]
    assert contents()[1] == "Sun."
    assert send(strict, SAID, {"role": "assistant", "content": searched}, SAID).status_code == 400


def test_client_tools_have_their_known_schema(strict: Any) -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash", **CACHED},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
    ]
    assert ignored(send(strict, SAID, tools=tools)) == []
    shell, editor = (tool["function"] for tool in text.given["tools"])
    assert (shell["name"], list(shell["parameters"]["properties"])) == ("bash", ["command", "restart"])
    assert editor["name"] == "str_replace_based_edit_tool"
    assert editor["parameters"]["required"] == ["command", "path"]


def test_server_tools_are_left_out_and_listed(server: Any, strict: Any) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, {"type": "mcp_toolset"}]
    mine = {"name": "look", "input_schema": {"type": "object"}, **CACHED, "defer_loading": True}
    listed = ["tools[].defer_loading", "tools[mcp_toolset]", "tools[web_search_20250305]"]
    assert ignored(send(server, SAID, tools=[*tools, mine])) == listed
    assert [tool["function"]["name"] for tool in text.given["tools"]] == ["look"]
    assert send(strict, SAID, tools=tools).status_code == 400


def test_an_answer_that_was_begun_is_continued(server: Any) -> None:
    begun = [{"role": "user", "content": "[One, two] go on"}, {"role": "assistant", "content": "One,"}]
    whole = send(server, *begun).json()
    assert [block["text"] for block in whole["content"]] == [" two"]
    streamed = send(server, *begun, stream=True).text
    assert "".join(re.findall(r'"text_delta","text":"([^"]*)"', streamed)) == " two"
    counted = server.post("/v1/messages/count_tokens", model=MODEL, messages=begun).json()["input_tokens"]
    assert counted == len("user:[One, two] go on\nassistant:One,")
    for content in ("", " ", [USE]):
        assert send(server, SAID, {"role": "assistant", "content": content}).status_code == 400


def test_a_format_under_its_older_name(server: Any) -> None:
    answer = send(server, SAID, output_format={"type": "json_schema", "schema": {"type": "object"}})
    assert "started without a tokenizer" in answer.text  # the toy has no grammars: the field was read


def test_what_claude_code_sends_beside(server: Any) -> None:
    late = {"role": "system", "content": [{"type": "text", "text": "Be brief.", **CACHED}], "output_config": {}}
    answer = server.http.post(
        "/v1/messages?beta=true",
        json={
            "model": "claude-opus-4-5",
            "max_tokens": 128000,
            "system": [{"type": "text", "text": "You are an agent.", **CACHED}],
            "messages": [SAID, late],
            "metadata": {"user_id": "u"},
            "thinking": {"type": "adaptive", "display": "omitted"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
        },
        headers={"anthropic-beta": "context-management-2025-06-27,effort-2025-11-24"},
    )
    listed = ["context_management", "messages[].output_config", "output_config.effort", "thinking.display"]
    assert ignored(answer) == listed
    assert text.given["enable_thinking"] is True
    assert [message["role"] for message in text.given["messages"]] == ["system", "user", "system"]


def test_the_probes_of_claude_code(server: Any) -> None:
    for path in ("/", "/api/hello"):
        assert server.http.head(path).status_code == 200


class SystemFirst(toys.Hermes):
    """Takes a system message only at the beginning, as many templates do."""

    def chat_prompt(self, messages: Any, **kwargs: Any) -> ChatPrompt:
        if any(message["role"] == "system" for message in messages[1:]):
            raise InvalidRequest("System message must be at the beginning.")
        return super().chat_prompt(messages, **kwargs)


def test_late_system_messages_are_the_users_where_the_template_wants_that(serve: Callable[..., Any]) -> None:
    wants = SystemFirst()
    with serve(InProcessClient(toys.open_parrot), wants, MODEL) as server:
        answer = send(server, SAID, {"role": "system", "content": "Be brief."}, system="You are an agent.")
        assert answer.json()["content"][0]["text"] == "hi"
    told = [(message["role"], message["content"]) for message in wants.given["messages"]]
    assert told == [("system", "You are an agent."), ("user", "[hi]\n\nBe brief.")]
    turns = [SAID, {"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}, SAID]
    assert [each["content"] for each in late_system_as_user(turns)] == ["[hi]", "a", "b\n\n[hi]"]
