"""Tools and reasoning through the server, judged by the official SDK: a toy says what models of each family say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.engine.assemble import assemble
from penstock.ipc.inprocess import InProcessClient
from penstock.text import ChatPrompt
from penstock.text.tool_formats import AnswerFormat, find_tool_format
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = {"city": "Zürich [north]", "days": 2}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
SAID = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {WRITTEN}}}\n</tool_call>',
    "llama": f'{{"name": "get_weather", "parameters": {WRITTEN}}}',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{WRITTEN}",
    "mistral-list": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {WRITTEN}}}]',
    "deepseek-v3.1": f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{WRITTEN}<｜tool▁call▁end｜>",
    "glm": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich [north]</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
    "kimi": f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{WRITTEN}<|tool_call_end|>",
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich [north]</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "qwen-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich [north]\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WRITTEN}",
    "gemma": '<|tool_call>call:get_weather{city:<|"|>Zürich [north]<|"|>,days:2}<tool_call|>',
    "json": f'{{"name": "get_weather", "arguments": {WRITTEN}}}',
}


class Scripted(toys.ToyText):
    """Keeps what it was given to render."""

    def __init__(self) -> None:
        self.speak("hermes")

    def speak(self, family: str, opened: bool = False) -> None:
        self.format = AnswerFormat(find_tool_format("", family), ("<think>", "</think>"))
        self.opened = opened

    def chat_prompt(self, messages: Any, **kwargs: Any) -> ChatPrompt:
        self.given = {"messages": messages, **kwargs}
        return super().chat_prompt(messages)

    def takes(self, name: str) -> bool:
        return name in ("enable_thinking", "reasoning_effort")


LIMITS = toys.LIMITS._replace(max_len=2048, num_blocks=1024)
text = Scripted()


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    client = InProcessClient(lambda: assemble(toys.Parrot(LIMITS), LIMITS), "parrot")  # type: ignore[arg-type]
    with serving(client, text, MODEL) as server:
        yield server


def say(answer: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"[={answer.encode().hex()}]"}]
    return {"model": MODEL, "messages": messages, "tools": TOOLS, **fields}


def both_ways(server: Server, answer: str, **fields: Any) -> Any:
    """The choice, whole; its stream, as the SDK puts it together, reads the same."""
    sdk = server.sdk()
    whole = sdk.chat.completions.create(**say(answer, **fields)).choices[0]
    with sdk.chat.completions.stream(**say(answer, **fields)) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert (streamed.message.content or None) == (whole.message.content or None)
    assert calls_of(streamed.message) == calls_of(whole.message)
    return whole


def calls_of(message: Any) -> list[tuple[str, str, str]]:
    return [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls or ()]


@pytest.mark.parametrize("family", SAID)
def test_a_call_of_each_family(scripted: Server, family: str) -> None:
    text.speak(family)
    choice = both_ways(scripted, SAID[family])
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    ((kind, name, arguments),) = calls_of(choice.message)
    assert (kind, name, json.loads(arguments)) == ("function", "get_weather", ARGUMENTS)


def test_deltas_are_as_the_sdk_adds_them_up(scripted: Server) -> None:
    text.speak("hermes")
    answer = f'<think>\nhm\n</think>\n\nWait.\n{SAID["hermes"]}\n<tool_call>{{"name": "now"}}</tool_call>'
    chunks = list(scripted.sdk().chat.completions.create(**say(answer, stream=True)))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(d.reasoning_content for d in deltas if "reasoning_content" in d.model_extra) == "hm"
    assert "".join(d.reasoning for d in deltas if "reasoning" in d.model_extra) == "hm"
    assert "".join(d.content or "" for d in deltas) == "Wait."
    calls = [d.tool_calls[0] for d in deltas if d.tool_calls]
    first = [call for call in calls if call.index == 0]
    assert (first[0].type, first[0].function.name, first[0].function.arguments) == ("function", "get_weather", "")
    assert first[0].id.startswith("call_")
    assert all(call.id is None and call.type is None and call.function.name is None for call in first[1:])
    assert len(first) > 10
    assert "".join(call.function.arguments for call in first) == WRITTEN
    assert [call.function.name for call in calls if call.index == 1] == ["now", None]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_raw_message_has_both_names_of_reasoning(scripted: Server) -> None:
    text.speak("hermes", opened=True)
    answer = scripted.post("/v1/chat/completions", **say("hm\n</think>\n\nyes")).json()
    message = answer["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "reasoning": "hm",
        "reasoning_content": "hm",
    }
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm\n</think>")


def test_without_tools_calls_are_text(scripted: Server) -> None:
    text.speak("hermes")
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        asked = say(SAID["hermes"], **fields)
        choice = scripted.sdk().chat.completions.create(**asked).choices[0]
        assert (choice.message.content, choice.finish_reason) == (SAID["hermes"], "stop")
        assert choice.message.tool_calls is None
        assert not text.given["tools"]


def test_a_call_cut_short_ends_with_length(scripted: Server) -> None:
    text.speak("hermes")
    whole = both_ways_cut(scripted, 65)
    assert whole.finish_reason == "length"
    ((_, name, arguments),) = calls_of(whole.message)
    assert name == "get_weather"
    assert WRITTEN.startswith(arguments)


def both_ways_cut(server: Server, limit: int) -> Any:
    whole = server.sdk().chat.completions.create(**say(SAID["hermes"], max_tokens=limit)).choices[0]
    chunks = server.sdk().chat.completions.create(**say(SAID["hermes"], max_tokens=limit, stream=True))
    pieces = [call.function.arguments for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    assert "".join(pieces) == whole.message.tool_calls[0].function.arguments
    return whole


def test_what_is_no_call_is_content(scripted: Server) -> None:
    text.speak("hermes")
    broken = SAID["hermes"].replace('"name"', '"nome"')
    choice = both_ways(scripted, broken)
    assert (choice.message.content, choice.finish_reason) == (broken, "stop")


def test_parallel_calls_and_one_alone(scripted: Server) -> None:
    text.speak("hermes")
    answer = SAID["hermes"] + "\n" + SAID["hermes"].replace("2", "3")
    assert len(both_ways(scripted, answer).message.tool_calls) == 2
    alone = both_ways(scripted, answer, parallel_tool_calls=False)
    assert len(alone.message.tool_calls) == 1
    assert alone.finish_reason == "tool_calls"
    repeated = both_ways(scripted, f"{answer}\n{SAID['hermes']}\nand so on")
    assert (len(repeated.message.tool_calls), repeated.finish_reason) == (2, "tool_calls")
    asked = say(f"{SAID['hermes']}\n{SAID['hermes']}\nand so on", extra_body={"penstock": True})
    report = scripted.sdk().chat.completions.create(**asked).model_dump()["penstock"]
    assert report["choices"][0]["finish"] == {"reason": "stop", "by": "repeated_call"}
    scripted.until_idle()


def test_several_choices_have_calls_of_their_own(scripted: Server) -> None:
    text.speak("hermes")
    choices = scripted.sdk().chat.completions.create(**say(SAID["hermes"], n=2)).choices
    ids = [choice.message.tool_calls[0].id for choice in choices]
    assert len(set(ids)) == 2


def test_logprobs_beside_calls(scripted: Server) -> None:
    text.speak("hermes")
    asked = say("a" + SAID["hermes"], logprobs=True)
    whole = scripted.sdk().chat.completions.create(**asked).choices[0]
    chunks = list(scripted.sdk().chat.completions.create(**asked, stream=True))
    streamed = [e.token for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.token for entry in whole.logprobs.content] == streamed
    assert len(streamed) == len(("a" + SAID["hermes"]).encode())


def test_the_template_is_given_tools_calls_and_results(scripted: Server) -> None:
    text.speak("hermes")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": WRITTEN}}
    asked = say("fine")
    asked["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    scripted.sdk().chat.completions.create(**asked, reasoning_effort="low")
    _, called, result = text.given["messages"]
    assert called["content"] is None
    assert called["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert called["reasoning_content"] == called["reasoning"] == "hm"
    assert result == {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
    assert text.given["tools"][0] == TOOLS[0]
    assert text.given["tools"][1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert text.given["reasoning_effort"] == "low"


def test_no_reasoning_and_other_words_to_the_template(scripted: Server) -> None:
    text.speak("hermes")
    sdk = scripted.sdk()
    sdk.chat.completions.create(**say("a", reasoning_effort="none"))
    assert text.given["enable_thinking"] is False
    sdk.chat.completions.create(**say("a"), extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert text.given["enable_thinking"] is True


def test_arguments_in_the_history_must_be_an_object(scripted: Server) -> None:
    text.speak("hermes")
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "[1]"}}
    asked = say("a") | {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    with pytest.raises(openai.BadRequestError, match="must be a JSON object") as caught:
        scripted.sdk().chat.completions.create(**asked)
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"
