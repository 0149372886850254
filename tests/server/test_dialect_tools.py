"""Tool calls and thinking in Anthropic's and Ollama's dialects: a toy says what models say, their clients judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import pytest

from penstock.engine.assemble import assemble
from penstock.ipc.inprocess import InProcessClient
from penstock.server.chat.chat_turn import after_thinking
from penstock.text import ChatPrompt
from penstock.types import Grammar, SamplingParams, Thinking
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
THOUGHT = "<think>\nAsk the sky.\n</think>\n\n"
LIMITS = toys.LIMITS._replace(max_len=2048, num_blocks=1024)


text = toys.Hermes("enable_thinking")


@pytest.fixture(scope="module")
def hermes() -> Iterator[Server]:
    client = InProcessClient(lambda: assemble(toys.Parrot(LIMITS), LIMITS), "parrot")  # type: ignore[arg-type]
    with serving(client, text, MODEL) as server:
        yield server


def asked(answer: str) -> list[Any]:
    return [{"role": "user", "content": f"[={answer.encode().hex()}]"}]


# -- Anthropic ----------------------------------------------------------------------------------------------------

TOOL: Any = {"name": "weather", "description": "Weather.", "input_schema": CITY}


@pytest.fixture(scope="module")
def claude(hermes: Server) -> Any:
    return anthropic.Anthropic(base_url=hermes.url, api_key="none", max_retries=0).messages


def message(claude: Any, answer: str, **fields: Any) -> Any:
    """The answer, which must be the same streamed and whole."""
    given = {"model": MODEL, "max_tokens": 500, "messages": asked(answer), "tools": [TOOL]} | fields
    whole = claude.create(**given)
    with claude.stream(**given) as stream:
        streamed = stream.get_final_message()
    told = [[block.model_dump(exclude={"id", "parsed_output"}) for block in each.content] for each in (whole, streamed)]
    assert told[0] == told[1]
    assert whole.stop_reason == streamed.stop_reason
    return whole


def test_a_call_is_a_block_of_its_own(claude: Any) -> None:
    told = message(claude, "Let me see.\n" + CALL)
    said, call = told.content
    assert (said.type, said.text) == ("text", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Zürich"})
    assert told.stop_reason == "tool_use"
    assert text.given["tools"][0]["function"]["parameters"] == CITY


def test_thinking_and_two_calls(claude: Any) -> None:
    told = message(claude, THOUGHT + CALL + "\n" + CALL.replace("Zürich", "Bern"), thinking={"type": "adaptive"})
    assert [block.type for block in told.content] == ["thinking", "tool_use", "tool_use"]
    assert told.content[0].thinking == "Ask the sky."
    assert told.content[1].id != told.content[2].id
    assert text.given["enable_thinking"] is True


def test_the_events_of_thinking_text_and_a_call(hermes: Server) -> None:
    fields = {"model": MODEL, "max_tokens": 500, "messages": asked(THOUGHT + "Well.\n" + CALL), "tools": [TOOL]}
    answer = hermes.post("/v1/messages", stream=True, **fields).text
    told = [json.loads(line.removeprefix("data: ")) for line in answer.split("\n") if line.startswith("data: ")]
    order = [(event["type"], event.get("index")) for event in told]
    assert [each for at, each in enumerate(order) if at == 0 or each != order[at - 1]] == [
        ("message_start", None),
        ("ping", None),
        *((f"content_block_{step}", index) for index in range(3) for step in ("start", "delta", "stop")),
        ("message_delta", None),
        ("message_stop", None),
    ]
    started = [event["content_block"] for event in told if event["type"] == "content_block_start"]
    assert [block["type"] for block in started] == ["thinking", "text", "tool_use"]
    assert started[2]["input"] == {}
    deltas = [event["delta"]["type"] for event in told if event["type"] == "content_block_delta"]
    assert set(deltas) == {"thinking_delta", "text_delta", "input_json_delta"}
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


def test_thinking_is_off_unless_asked_for(claude: Any) -> None:
    message(claude, "hi")
    assert text.given["enable_thinking"] is False


def test_without_tools_a_call_is_text(claude: Any) -> None:
    for fields in ({"tools": []}, {"tool_choice": {"type": "none"}}):
        told = message(claude, CALL, **fields)
        assert [block.type for block in told.content] == ["text"]
        assert told.stop_reason == "end_turn"
        assert text.given["tools"] == []


def test_one_call_at_a_time_when_asked(claude: Any) -> None:
    told = message(claude, CALL + "\n" + CALL, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in told.content] == ["tool_use"]


def test_a_call_that_is_cut_off(claude: Any) -> None:
    told = claude.create(model=MODEL, max_tokens=70, messages=asked(CALL), tools=[TOOL])
    assert told.stop_reason == "max_tokens"
    whole = claude.create(model=MODEL, max_tokens=50, messages=asked(CALL), tools=[TOOL])
    assert (whole.stop_reason, [block.type for block in whole.content]) == ("max_tokens", ["tool_use"])
    assert list(whole.content[0].input) == ["INVALID_JSON"]


def test_arguments_that_cannot_be_read_are_told_as_they_are(claude: Any) -> None:
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city": Z}}\n</tool_call>'
    call = claude.create(model=MODEL, max_tokens=200, messages=asked(broken), tools=[TOOL]).content[0]
    assert (call.type, call.input) == ("tool_use", {"INVALID_JSON": '{"city": '})


def test_a_result_goes_back_in_the_templates_words(claude: Any) -> None:
    call = message(claude, CALL).content
    result = {"type": "tool_result", "tool_use_id": call[0].id, "content": "no sky", "is_error": True}
    turns = [*asked(CALL), {"role": "assistant", "content": call}, {"role": "user", "content": [result]}]
    claude.create(model=MODEL, max_tokens=500, messages=turns, tools=[TOOL])
    said, told = text.given["messages"][1:]
    assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Zürich"}}
    assert told == {"role": "tool", "tool_call_id": call[0].id, "name": "weather", "content": "Error: no sky"}


# -- Ollama -------------------------------------------------------------------------------------------------------

FUNCTION = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": CITY}}


@pytest.fixture(scope="module")
def llama(hermes: Server) -> ollama.Client:
    return ollama.Client(hermes.url)


def reply(llama: ollama.Client, answer: str, **fields: Any) -> ollama.Message:
    """The message, which must be the same streamed and whole."""
    given: dict[str, Any] = {"model": MODEL, "messages": asked(answer), "tools": [FUNCTION]} | fields
    whole = llama.chat(**given).message
    parts = [part.message for part in llama.chat(**given, stream=True)]
    assert "".join(part.content or "" for part in parts) == whole.content
    assert "".join(part.thinking or "" for part in parts) == (whole.thinking or "")
    assert [call for part in parts for call in part.tool_calls or ()] == list(whole.tool_calls or ())
    return whole


def test_ollama_calls_have_objects_for_arguments(llama: ollama.Client) -> None:
    said = reply(llama, "Let me see.\n" + CALL + "\n" + CALL.replace("Zürich", "Bern") + "\n" + CALL)
    assert said.content == "Let me see."
    assert [(call.function.name, call.function.arguments) for call in said.tool_calls or ()] == [
        ("weather", {"city": "Zürich"}),
        ("weather", {"city": "Bern"}),
    ]


def test_ollama_calls_that_are_cut_off_are_text(llama: ollama.Client) -> None:
    said = reply(llama, CALL, options={"num_predict": 60})
    assert not said.tool_calls
    assert said.content == 'weather({"city": "Züri'


def test_ollama_thinking_is_told_apart(llama: ollama.Client) -> None:
    said = reply(llama, THOUGHT + "Blue.", think=True)
    assert (said.thinking, said.content) == ("Ask the sky.", "Blue.")
    assert text.given["enable_thinking"] is True
    reply(llama, "Blue.", think=False)
    assert text.given["enable_thinking"] is False
    reply(llama, "Blue.")
    assert "enable_thinking" not in text.given
    told = llama.generate(MODEL, asked(THOUGHT + "Blue.")[0]["content"])
    assert (told.thinking, told.response) == ("Ask the sky.", "Blue.")
    reply(llama, "Blue.", think="high")  # of a template that knows no efforts
    assert text.given["enable_thinking"] is True


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"enable_thinking": False}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "low"}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_chats_say_in_many_ways_whether_to_think(hermes: Server, fields: dict[str, Any], thinks: bool) -> None:
    answer = hermes.post("/v1/chat/completions", model=MODEL, messages=asked("Blue."), **fields)
    assert (answer.status_code, text.given["enable_thinking"]) == (200, thinks)


def test_ollama_calls_and_results_go_back(llama: ollama.Client) -> None:
    said = reply(llama, CALL)
    result = {"role": "tool", "tool_name": "weather", "content": "sun"}
    llama.chat(MODEL, [*asked(CALL), said, result], tools=[FUNCTION])
    call, told = text.given["messages"][1:]
    assert call["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Zürich"}}
    assert told == {"role": "tool", "name": "weather", "content": "sun"}


# -- grammars -----------------------------------------------------------------------------------------------------


MARKS = {"<think>": [toys.END], "</think>": [60, 61]}


class Spelling(toys.Hermes):
    class tokenizer(toys.ToyTokenizer):
        @staticmethod
        def encode(text: str, *, special: bool) -> list[int]:
            return MARKS[text]


class Marks(toys.ToyTokenizer):
    def encode(self, text: str, *, special: bool) -> list[int]:
        return list(text.encode())


@pytest.mark.parametrize("begun", [True, False])
def test_a_budget_for_thinking(serve: Any, begun: bool) -> None:
    """Where no one token opens the thoughts, nobody could say where they begin: then it is told that it is not kept."""

    class Opened(toys.Hermes):
        tokenizer = Marks()
        opened = begun

    client = InProcessClient(lambda: assemble(toys.Parrot(LIMITS), LIMITS), "parrot")  # type: ignore[arg-type]
    with serve(client, Opened(), MODEL) as server:
        sdk = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages
        fields: Any = {"thinking": {"type": "enabled", "budget_tokens": 9}, "max_tokens": 22}
        told = sdk.create(model=MODEL, messages=asked("Let me think about it."), **fields)
    if begun:
        assert told.content[0].thinking == "Let me th"
        assert told.content[1].text == "t it."
        assert not hasattr(told, "penstock")
    else:
        assert told.penstock["ignored_fields"] == ["thinking.budget_tokens"]


@pytest.mark.parametrize(("opened", "opens"), [(True, -1), (False, toys.END)])
def test_a_grammar_holds_after_the_thinking(opened: bool, opens: int) -> None:
    sampling = SamplingParams(grammar=Grammar("json", "{}"))
    held = after_thinking(Spelling(), ChatPrompt([], opened), sampling).grammar  # type: ignore[arg-type]
    assert held == Grammar("json", "{}", Thinking((60, 61), opens))


def test_where_there_is_no_thinking_a_grammar_holds_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(grammar=Grammar("json", "{}"))
    assert after_thinking(toys.ToyText(), ChatPrompt([]), sampling) is sampling  # type: ignore[arg-type]
    monkeypatch.setitem(MARKS, "<think>", [1, 2])
    assert after_thinking(Spelling(), ChatPrompt([]), sampling) is sampling  # type: ignore[arg-type]
