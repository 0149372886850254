"""Answers taken apart: what templates render is read back, and no way of cutting a text changes what is read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.text.parse import (
    AnswerParser,
    AnswerPart,
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    Reasoning,
    schemas_of,
)
from penstock.text.tool_formats import PLAIN, TOOL_FORMATS, AnswerFormat, find_tool_format, reasoning_of
from tests.examples import examples

GOLDENS = json.loads((Path(__file__).parent / "data" / "calls.json").read_text())
TOOLS = schemas_of(GOLDENS["tools"])
THINK = ("<think>", "</think>")


def format_of(family: str, reasoning: Any = THINK) -> AnswerFormat:
    return AnswerFormat(find_tool_format("", family), reasoning and tuple(reasoning))


def parts(format: AnswerFormat, pieces: list[str], tools: Any = TOOLS, **how: Any) -> list[AnswerPart]:
    ids = itertools.count()
    parser = AnswerParser(format, tools, new_id=lambda: f"id{next(ids)}", **how)
    found = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert parser.push("more") == []
    return found


def read(found: list[AnswerPart]) -> dict[str, Any]:
    """What the parts come to; and that they come in order."""
    calls: list[list[str]] = []
    whole = {"content": "", "thought": "", "calls": calls, "open": None}
    for part in found:
        match part:
            case Content(text) | Reasoning(text):
                assert text
                assert whole["open"] is None
                whole["content" if isinstance(part, Content) else "thought"] += text
            case CallStarted(index, id, name):
                assert (index, whole["open"]) == (len(calls), None)
                whole["open"] = index
                calls.append([id, name, ""])
            case Arguments(index, text):
                assert text
                assert index == whole["open"]
                calls[index][2] += text
            case CallEnded(index):
                assert index == whole["open"]
                whole["open"] = None
    return whole


def parse(format: AnswerFormat, text: str, **how: Any) -> dict[str, Any]:
    return read(parts(format, [text], **how))


@pytest.mark.parametrize("turn", GOLDENS["turns"], ids=lambda turn: turn["template"])
def test_what_templates_render_is_read_back(turn: dict[str, Any]) -> None:
    format = format_of(turn["family"], turn["reasoning"])
    for pieces in ([turn["text"]], list(turn["text"])):
        got = read(parts(format, pieces, opened=turn["opened"]))
        assert got["content"] == turn["content"]
        assert got["thought"] == turn["thought"]
        calls = [{"name": name, "arguments": json.loads(arguments)} for _, name, arguments in got["calls"]]
        assert calls == turn["calls"]


def test_every_family_has_a_golden() -> None:
    named = {turn["family"] for turn in GOLDENS["turns"]}
    assert {family.name for family in (*TOOL_FORMATS, PLAIN)} - named == {"nemotron-v2"}


# -- every way of cutting -----------------------------------------------------------------------------------------

WORDS = ["{", "}", '"', "\\", "\n", " ", ",", ":", "[", "]", "<", "<|", "[T", "é", "x", "12", "true", "get_weather"]
WORDS += [
    '{"name": "get_weather", "arguments": ',
    '{"name": "now", "arguments": {}}',
    '{"city": "a"}',
    "now",
    "```json",
]
TEXTS = {
    family.name: [turn["text"] for turn in GOLDENS["turns"] if turn["family"] == family.name]
    for family in (*TOOL_FORMATS, PLAIN)
}
TEXTS["nemotron-v2"] = [
    '<TOOLCALL>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {"a": 1}}]</TOOLCALL>'
]


@st.composite
def said(draw: st.DrawFn) -> tuple[str, str]:
    """A family, and a text like its own: whole, cut short, with a piece missing or put in, or made of its markers."""
    family = draw(st.sampled_from((*TOOL_FORMATS, PLAIN)))
    markers = [*THINK, *WORDS, *(p for calls in family.calls for p in calls.patterns if p)]
    markers += ["<|channel|>final<|message|>", "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"]
    noise = st.lists(st.sampled_from(markers), max_size=8).map("".join)
    text = draw(st.sampled_from(TEXTS[family.name]))
    start, stop = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
    kind = draw(st.sampled_from(["whole", "cut", "missing", "added", "noise"]))
    made = {
        "whole": text,
        "cut": text[:stop],
        "missing": text[:start] + text[stop:],
        "added": text[:start] + draw(noise) + text[start:],
        "noise": draw(noise) + draw(noise),
    }
    return family.name, made[kind]


def cut(draw: st.DrawFn, text: str) -> list[str]:
    if draw(st.booleans()):
        return list(text)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


@settings(max_examples=examples(250))
@given(st.data())
def test_no_way_of_cutting_changes_what_is_read(data: st.DataObject) -> None:
    name, text = data.draw(said())
    how = {"opened": data.draw(st.booleans()), "parallel": data.draw(st.booleans())}
    format = format_of(name)
    whole = parse(format, text, **how)
    assert read(parts(format, data.draw(st.composite(cut)(text)), **how)) == whole
    assert whole["open"] is None


@settings(max_examples=examples(120))
@given(said())
def test_what_is_no_call_is_content_to_the_letter(case: tuple[str, str]) -> None:
    name, text = case
    format = format_of(name, None)
    if not (format.tool_format.channels or format.tool_format.content[0]):
        whole = parse(format, text)
        openings = tuple(each for syntax in format.tool_format.calls for each in syntax.openings)
        torso = text.startswith(whole["content"]) and text[len(whole["content"]) :].lstrip().startswith(openings)
        assert whole["content"] == text or whole["calls"] or torso
        assert parse(format, text, tools=None)["content"] == text


@settings(max_examples=examples(120))
@given(said())
@example(("llama", '{"name": "get_weather", "parameters": {"days": 3, "metric": tr'))
def test_arguments_are_json_or_its_beginning(case: tuple[str, str]) -> None:
    name, text = case
    for _, _, arguments in parse(format_of(name), text)["calls"]:
        assert any(is_json(arguments + end) for end in ENDINGS), arguments


ENDINGS = ["".join(end) for n in range(6) for end in itertools.product('"}]', repeat=n)]
WORDS = [word[cut:] for word in ("true", "false", "null") for cut in range(1, len(word))]
ESCAPES = ["\\", '\\": 0', *("0" * n for n in range(1, 5)), *("0" * n + '": 0' for n in range(1, 5))]
MIDDLES = dict.fromkeys(["e0", *WORDS, ": 0", '"": 0', '": 0', '0"', *ESCAPES])
ENDINGS += [middle + end for middle in MIDDLES for end in ENDINGS]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


@settings(max_examples=examples(60))
@given(st.text(max_size=60).filter(lambda text: "<think>" not in text), st.booleans())
def test_plain_text_stays_as_it_is(text: str, tools: bool) -> None:
    for family in ("hermes", "glm", "mistral", "llama", "json"):
        whole = parse(format_of(family), text, tools=TOOLS if tools else None)
        assert whole["content"] == text
        assert not whole["thought"]


# -- one by one ---------------------------------------------------------------------------------------------------


def test_only_what_may_be_a_marker_is_held_back() -> None:
    parser = AnswerParser(format_of("hermes"), TOOLS)
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" <to") == []
    assert parser.push("ad") == [Content(" <toad")]
    assert parser.push("\n<tool_call>\n{") == []
    assert parser.push('"name": "now", "arguments": ') == []
    begun, *rest = parser.push("{")
    assert (begun.index, begun.name, rest) == (0, "now", [Arguments(0, "{")])
    assert parser.push('"a": "b') == [Arguments(0, '"a": "b')]
    assert parser.push('c"}') == [Arguments(0, 'c"}')]
    assert parser.push("}\n</tool_call>") == [CallEnded(0)]
    assert parser.finish() == []


def test_a_call_that_is_none_is_given_up_at_its_first_wrong_character() -> None:
    parser = AnswerParser(format_of("hermes"), TOOLS)
    assert parser.push("<tool_call>{") == []
    assert parser.push("x") == [Content("<tool_call>{x")]
    parser = AnswerParser(format_of("llama"), TOOLS)
    assert parser.push('{"na') == []
    assert parser.push('tion": 1') == [Content('{"nation": 1')]
    parser = AnswerParser(format_of("llama"), TOOLS)
    assert parser.push('{"name": "Bob"') == [Content('{"name": "Bob"')]


def test_parameters_take_their_types_from_the_schema() -> None:
    text = (
        "<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=i>\n12\n</parameter>\n"
        "<parameter=b>\nTrue\n</parameter>\n<parameter=n>None</parameter>\n<parameter=o>\n{'no': json}\n</parameter>\n"
        "<parameter=u>\nfree\n</parameter>\n<parameter=v>\n[1]\n</parameter>\n</function>\n</tool_call>"
    )
    types = {"s": "string", "i": "integer", "b": "boolean", "n": ["integer", "null"], "o": "object"}
    schema = {"properties": {name: {"type": type} for name, type in types.items()}}
    ((_, name, arguments),) = parse(format_of("qwen-coder"), text, tools={"f": schema})["calls"]
    expected = {"s": "12", "i": 12, "b": True, "n": None, "o": "{'no': json}", "u": "free", "v": [1]}
    assert (name, json.loads(arguments)) == ("f", expected)


def test_strings_stream_and_other_values_come_whole() -> None:
    parser = AnswerParser(format_of("glm"), {"f": {"properties": {"s": {"type": "string"}}}})
    parser.push("<tool_call>f<arg_key>s</arg_key><arg_value>a")
    assert parser.push('"b\n') == [Arguments(0, '\\"b\\n')]
    assert parser.push("</arg") == []
    assert parser.push("_value><arg_key>t</arg_key><arg_value>[1,") == [Arguments(0, '", "t": ')]
    assert parser.push(" 2]</arg_value>") == [Arguments(0, "[1, 2]")]


def test_a_name_that_comes_last_holds_the_arguments_back() -> None:
    got = parse(format_of("hermes"), '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>')
    assert got["calls"] == [["id0", "now", '{"a": 1}']]
    assert parse(format_of("hermes"), '<tool_call>{"name": "now"}</tool_call>')["calls"] == [["id0", "now", "{}"]]


def test_raw_line_breaks_and_lone_backslashes_become_json() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"re": "\\d\n\\u12", "ok": "\\n\\u00e9"}}</tool_call>'
    ((_, _, arguments),) = parse(format_of("hermes"), text)["calls"]
    assert json.loads(arguments) == {"re": "\\d\n\\u12", "ok": "\né"}


def test_where_arguments_break_the_rest_is_content() -> None:
    got = parse(format_of("hermes"), '<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call> bye')
    assert got["calls"] == [["id0", "now", '{"a": ']]
    assert got["content"] == "oops}}</tool_call> bye"


def test_one_call_where_one_is_wanted() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    got = parse(format_of("hermes"), f"a{call}b{call}c", parallel=False)
    assert (len(got["calls"]), got["content"]) == (1, "ab")


CALLS = ['{"name": "now", "arguments": {"a": %d}}' % number for number in range(3)]  # noqa: UP031
MARKED = [f"<tool_call>{call}</tool_call>" for call in CALLS]


@pytest.mark.parametrize(("family", "calls"), [("hermes", MARKED), ("json", CALLS)])
@pytest.mark.parametrize("end", [None, -3, 12])
def test_a_call_that_repeats_another_ends_the_answer(family: str, calls: list[str], end: int | None) -> None:
    """Whether it came whole or was cut off; and nothing of it is streamed before it differs."""
    one, two, _ = calls
    text = "\n".join([one, two, one[:end]])
    for pieces in ([text], list(text)):
        got = read(parts(format_of(family), pieces))
        assert [json.loads(arguments) for _, _, arguments in got["calls"]] == [{"a": 0}, {"a": 1}]
        assert got["content"] == ""
    parser = AnswerParser(format_of(family), TOOLS)
    parser.push("\n".join([one, one, two]))
    assert parser.ended
    assert parser.calls == 1


def test_a_call_that_was_cut_off_is_no_content() -> None:
    assert parse(format_of("hermes"), 'Well.\n<tool_call>{"name": "no')["content"] == "Well."
    assert parse(format_of("glm"), "<tool_call>no")["content"] == ""
    assert parse(format_of("json"), '{"name": "no', forced=True)["content"] == ""
    assert parse(format_of("json"), '{"name": "no')["content"] == '{"name": "no'


def test_ids() -> None:
    kimi = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    )
    assert parse(format_of("kimi"), kimi)["calls"] == [["functions.now:3", "now", "{}"]]
    mistral = "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}"
    assert parse(format_of("mistral"), mistral)["calls"] == [["abcdefghi", "now", "{}"]]
    (begun, *_) = AnswerParser(format_of("mistral"), TOOLS).push("[TOOL_CALLS]now[ARGS]{")
    assert begun.id.isalnum()
    assert len(begun.id) == 9


@pytest.mark.parametrize(
    ("text", "opened", "thought", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("hm\n</think>\n\nyes", True, "hm", "yes"),
        ("\n\n</think>\n\nyes", True, "", "yes"),
        ("hm ", True, "hm ", ""),
        ("yes <think>no</think>", False, "", "yes <think>no</think>"),
        ("<thin", False, "", "<thin"),
        ("\n yes", False, "", "\n yes"),
    ],
)
def test_reasoning(text: str, opened: bool, thought: str, content: str) -> None:
    got = parse(format_of("hermes"), text, opened=opened)
    assert (got["thought"], got["content"]) == (thought, content)


def test_channels() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.now "
    text += '<|constrain|>json<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>final<|message|>yes<|return|>'
    got = parse(format_of("harmony"), text)
    assert (got["thought"], got["content"], got["calls"]) == ("hm", "yes", [["id0", "now", '{"a": 1}']])
    assert parse(format_of("harmony"), text, tools=None)["content"] == '{"a": 1}yes'
    assert parse(format_of("harmony"), "no header")["content"] == "no header"


SOLAR = AnswerFormat(find_tool_format("", "solar"), find_tool_format("", "solar").reasoning)


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|>", "Hm.", "Yes."),
        ("<|think|>Hm.<|end|><|begin|>assistant<|content|> {1}\n<|end|><|begin|>user", "Hm.", " {1}"),
        ("<|content|>Yes.", "", "Yes."),
        ("<|think|><|end|><|begin|>assistant<|content|>Yes.", "", "Yes."),
        ("<|think|>Hm.<|end|>", "Hm.<|end|>", ""),
        ('{"a": 1}', "", '{"a": 1}'),
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_content_between_markers(text: str, thought: str, content: str, tools: Any) -> None:
    for cut in ([text], list(text)):
        got = read(parts(SOLAR, cut, tools))
        assert (got["thought"], got["content"].strip(), got["calls"]) == (thought, content.strip(), [])


def test_the_prompt_tells_whether_reasoning_is_open() -> None:
    format = format_of("hermes")
    assert format.opened("<|im_start|>assistant\n<think>\n")
    assert not format.opened("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not AnswerFormat(PLAIN).opened("<think>")


def test_families_are_recognised_by_their_markers() -> None:
    assert find_tool_format("{{ '<tool_call>' }}").name == "hermes"
    assert find_tool_format("<tool_call><function=f><parameter=p>").name == "qwen-coder"
    assert find_tool_format("nothing").name == "json"
    assert find_tool_format("<tool_call>", "kimi").name == "kimi"
    assert reasoning_of("content.split('</think>')") == THINK
    assert reasoning_of("nothing") is None
    with pytest.raises(ConfigError, match="there are harmony"):
        find_tool_format("", "nonsense")
