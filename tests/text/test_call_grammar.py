"""Answers held to a grammar of calls are read by the parser as calls, in every family."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import llguidance
import pytest

from penstock.text.grammar.call_grammar import call_grammar
from penstock.text.parse import AnswerParser, Arguments, CallStarted, Content
from penstock.text.tool_formats import PLAIN, TOOL_FORMATS, AnswerFormat, ToolFormat

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: dict[str, Any] = {"get_weather": CITY, "now": {"type": "object", "additionalProperties": False}}
SPECIAL = ["<|call|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "[TOOL_CALLS]", "[ARGS]"]
SPECIAL += ["<|tool_call_begin|>", "<｜tool▁sep｜>", '<|"|>', "<|tool_call>"]
END = 256
IDS = {text: END + 1 + index for index, text in enumerate(SPECIAL)}


class Bytes:
    """Every byte a token, an end, and some special tokens."""

    eos_token_id = END
    bos_token_id = None
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"] + [text.encode() for text in SPECIAL]
    special_token_ids = list(range(END, len(tokens)))  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def sampled(tokenizer: Any, grammar: str, endings: tuple[str, ...], chance: random.Random) -> str:
    """Now and then the text of a parameter is ended: chance would hardly spell that."""
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    said: list[int] = []
    while not matcher.is_stopped() and len(said) < 2000:
        marker = list(chance.choice(endings).encode()) if endings and chance.random() < 0.1 else []
        if marker and matcher.validate_tokens(marker) == len(marker):
            assert matcher.consume_tokens(marker)
            said += marker
            continue
        mask = matcher.compute_logit_bias()
        allowed = [token for token, bias in enumerate(mask) if bias]
        ending = [token for token in allowed if token in ENDING]
        token = chance.choice(ending if ending and chance.random() < 0.9 else allowed)
        if token == END:
            break
        assert matcher.consume_token(token)
        said.append(token)
    return b"".join(Bytes.tokens[token] for token in said).decode("utf-8", "replace")


ENDING = {*b'"}</', *range(END, len(Bytes.tokens))}  # a text soon comes to its end where these are likely


@pytest.mark.parametrize("family", [*TOOL_FORMATS, PLAIN], ids=lambda family: family.name)
def test_what_the_grammar_allows_is_read_as_calls(tokenizer: Any, family: ToolFormat) -> None:
    for seed in range(3):
        grammar = call_grammar(family, TOOLS, IDS, parallel=seed > 0)
        endings = family.calls[0].parameter[1] if family.calls[0].parameter else ()
        text = sampled(tokenizer, grammar, endings, random.Random(seed))
        parser = AnswerParser(AnswerFormat(family), TOOLS)
        found = parser.push(text) + parser.finish()
        assert not [part for part in found if isinstance(part, Content)], text
        calls = [part for part in found if isinstance(part, CallStarted)]
        assert len(calls) == 1 if seed == 0 else len(calls) >= 1, text
        for call in calls:
            written = "".join(p.text for p in found if isinstance(p, Arguments) and p.index == call.index)
            arguments = json.loads(written)
            assert arguments.keys() >= set(TOOLS[call.name].get("required", ())), text
            assert arguments.get("unit", "C") in ("C", "F")
            assert arguments.get("days", 1) in range(1, 10)


LINES = r"""
start: line~1..2 "end"
line: "line " /[!-~]{1,4}/ LF
%import common.LF
"""
TEXT_TOOL: dict[str, Any] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@pytest.mark.parametrize("family", [*TOOL_FORMATS, PLAIN], ids=lambda family: family.name)
def test_the_input_of_a_tool_matches_its_own_grammar(tokenizer: Any, family: ToolFormat) -> None:
    forced = call_grammar(family, {"edit": TEXT_TOOL}, IDS, parallel=False, inputs={"edit": LINES})
    for seed in range(5):
        text = sampled(tokenizer, forced, (), random.Random(seed))
        found = (parser := AnswerParser(AnswerFormat(family), {"edit": TEXT_TOOL})).push(text) + parser.finish()
        given = json.loads("".join(part.text for part in found if isinstance(part, Arguments)))
        assert re.fullmatch(r"(line [!-~]{1,4}\n){1,2}end", given["input"]), text
        before = "" if family.channels or family.calls[0].bare else "Well.\n"
        open_one = call_grammar(family, {"edit": TEXT_TOOL}, IDS, parallel=False, free=True, inputs={"edit": LINES})
        assert allows(tokenizer, open_one, before + text.lstrip(), IDS), text
        assert not allows(tokenizer, open_one, before + text.lstrip().replace("end", "fin"), IDS), text


def spelled(text: str, special: dict[str, int]) -> list[int]:
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    return [token for piece in pieces for token in ([special[piece]] if piece in special else piece.encode())]


def allows(tokenizer: Any, grammar: str, text: str, special: dict[str, int]) -> bool:
    """The whole text, and no more."""
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = spelled(text, special)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


TALK = ["", "\n\nHello, <b>you</b>.", "[1] a list, and { a brace }", "Nearly: <tool_cal", "漢字 👩‍👩‍👧"]


CASES = [  # with special tokens and, where no channels need them, without
    pytest.param(family, special, id=f"{family.name}-{'special' if special else 'spelled'}")
    for family in (*TOOL_FORMATS, PLAIN)
    for special in (IDS, {})
    if special or not family.channels
]


@pytest.mark.parametrize(("family", "special"), CASES)
def test_a_free_answer_is_talk_or_calls(tokenizer: Any, family: ToolFormat, special: dict[str, int]) -> None:
    """Calls are held to their schemas, and nothing that is not reads as a call."""
    free = call_grammar(family, TOOLS, special, free=True)
    talk = f"<|channel|>final<|message|>{TALK[1]}" if family.channels else None
    assert all(allows(tokenizer, free, each, special) for each in ([talk] if talk else TALK))
    endings = family.calls[0].parameter[1] if family.calls[0].parameter else ()
    if family.calls[0].quote and not special:
        endings = (family.calls[0].quote,)
    before = "" if family.channels or family.calls[0].bare else "Well.\n"
    for seed in range(3):
        call = sampled(tokenizer, call_grammar(family, TOOLS, special), endings, random.Random(seed)).lstrip()
        if "\ufffd" in call:
            continue  # cannot be spelled again
        assert allows(tokenizer, free, before + call, special), call
        for name, other in (("get_weather", "get_whether"), ("now", "then"), ('"city"', '"town"'), ("unit", "united")):
            assert name not in call or not allows(tokenizer, free, before + call.replace(name, other), special), call


def test_only_the_tools_given(tokenizer: Any) -> None:
    grammar = call_grammar(TOOL_FORMATS[-1], {"now": {}}, {}, parallel=False)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert matcher.consume_tokens(list(b'{"name": "now", "parameters": {'))
    matcher.reset()
    assert not matcher.consume_tokens(list(b'{"name": "get'))


NUMBER: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 9}
COUNT = {"count": {"type": "object", "properties": {"n": NUMBER}, "required": ["n"], "additionalProperties": False}}
FREE = {"count": {"type": "object", "properties": {"n": {"const": 77}}, "required": ["n"]}}
CONTENT: dict[str, Any] = {"type": "object", "properties": {"name": {"$ref": "#/$defs/word"}}, "required": ["name"]}
CONTENT |= {"additionalProperties": False, "$defs": {"word": {"enum": ["a", "b"]}}}


@pytest.mark.parametrize("family", [*TOOL_FORMATS, PLAIN], ids=lambda family: family.name)
def test_calls_or_what_a_schema_says(tokenizer: Any, family: ToolFormat) -> None:
    grammar = call_grammar(family, COUNT, IDS, content=CONTENT)
    header = "<|channel|>final<|message|>" if family.channels else ""
    good, bad = (
        sampled(tokenizer, call_grammar(family, tools, IDS, parallel=False), (), random.Random(1)).lstrip()
        for tools in (COUNT, FREE)
    )
    assert allows(tokenizer, grammar, header + '{"name": "a"}', IDS)
    assert not allows(tokenizer, grammar, header + '{"name": "c"}', IDS)
    assert not allows(tokenizer, grammar, header + "Well", IDS)
    assert allows(tokenizer, grammar, good, IDS)
    assert not allows(tokenizer, grammar, bad, IDS)


def test_parameters_that_refer_to_their_own_definitions(tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"], "$defs": {"n": NUMBER}}
    grammar = call_grammar(PLAIN, {"count": schema}, IDS, content=CONTENT)
    assert allows(tokenizer, grammar, '{"name": "count", "arguments": {"n": 7}}', IDS)
    assert not allows(tokenizer, grammar, '{"name": "count", "arguments": {"n": 77}}', IDS)
