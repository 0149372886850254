"""Answers held to a grammar of calls are read by the parser as calls, in every family."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import llguidance
import pytest

from penstock.text.call_grammar import call_grammar
from penstock.text.families import FAMILIES, PLAIN, Family, Format
from penstock.text.parse import AnswerParser, Arguments, CallBegun, Content

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


@pytest.mark.parametrize("family", [*FAMILIES, PLAIN], ids=lambda family: family.name)
def test_what_the_grammar_allows_is_read_as_calls(tokenizer: Any, family: Family) -> None:
    special = {text: END + 1 + index for index, text in enumerate(SPECIAL)}
    for seed in range(3):
        grammar = call_grammar(family, TOOLS, special, parallel=seed > 0)
        endings = family.calls[0].parameter[1] if family.calls[0].parameter else ()
        text = sampled(tokenizer, grammar, endings, random.Random(seed))
        parser = AnswerParser(Format(family), TOOLS)
        found = parser.push(text) + parser.finish()
        assert not [part for part in found if isinstance(part, Content)], text
        calls = [part for part in found if isinstance(part, CallBegun)]
        assert len(calls) == 1 if seed == 0 else len(calls) >= 1, text
        for call in calls:
            written = "".join(p.text for p in found if isinstance(p, Arguments) and p.index == call.index)
            arguments = json.loads(written)
            assert arguments.keys() >= set(TOOLS[call.name].get("required", ())), text
            assert arguments.get("unit", "C") in ("C", "F")
            assert arguments.get("days", 1) in range(1, 10)


def test_only_the_tools_given(tokenizer: Any) -> None:
    grammar = call_grammar(FAMILIES[-1], {"now": {}}, {}, parallel=False)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert matcher.consume_tokens(list(b'{"name": "now", "parameters": {'))
    matcher.reset()
    assert not matcher.consume_tokens(list(b'{"name": "get'))


def allows(tokenizer: Any, grammar: str, text: str) -> bool:
    """The text and an end after it."""
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(tokens(text)) and matcher.is_accepting()


def tokens(text: str) -> list[int]:
    parts = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
    return [token for part in parts for token in ([SPECIALS[part]] if part in SPECIALS else part.encode())]


SPECIALS = {text: END + 1 + index for index, text in enumerate(SPECIAL)}


def a_call(tokenizer: Any, family: Family, tools: dict[str, Any]) -> str:
    grammar = call_grammar(family, tools, SPECIALS, parallel=False)
    return sampled(tokenizer, grammar, (), random.Random(1)).lstrip()


NUMBER: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 9}
COUNT = {"count": {"type": "object", "properties": {"n": NUMBER}, "required": ["n"], "additionalProperties": False}}
FREE = {"count": {"type": "object", "properties": {"n": {"const": 77}}, "required": ["n"]}}
CONTENT: dict[str, Any] = {"type": "object", "properties": {"name": {"$ref": "#/$defs/word"}}, "required": ["name"]}
CONTENT |= {"additionalProperties": False, "$defs": {"word": {"enum": ["a", "b"]}}}


@pytest.mark.parametrize("family", [*FAMILIES, PLAIN], ids=lambda family: family.name)
def test_strict_calls_after_any_text(tokenizer: Any, family: Family) -> None:
    """Text that begins no call is free; one that does is held to the schema."""
    grammar = call_grammar(family, COUNT, SPECIALS, prose=True)
    good, bad = a_call(tokenizer, family, COUNT), a_call(tokenizer, family, FREE)
    header = "<|channel|>final<|message|>" if family.channels else ""
    assert allows(tokenizer, grammar, f"{header}Well, a < b [1] {{2}}")
    assert allows(tokenizer, grammar, good)
    assert not allows(tokenizer, grammar, bad)
    if not (family.channels or family.calls[0].bare):
        assert allows(tokenizer, grammar, f"Let me see:{good}")
        assert allows(tokenizer, grammar, f"Let me see: {good}{good}")
        assert not allows(tokenizer, grammar, f"Let me see: {bad}")
        assert not allows(tokenizer, call_grammar(family, COUNT, SPECIALS, prose=True, parallel=False), good + good)


@pytest.mark.parametrize("family", [*FAMILIES, PLAIN], ids=lambda family: family.name)
def test_calls_or_what_a_schema_says(tokenizer: Any, family: Family) -> None:
    grammar = call_grammar(family, COUNT, SPECIALS, content=CONTENT)
    header = "<|channel|>final<|message|>" if family.channels else ""
    assert allows(tokenizer, grammar, header + '{"name": "a"}')
    assert not allows(tokenizer, grammar, header + '{"name": "c"}')
    assert not allows(tokenizer, grammar, header + "Well")
    assert allows(tokenizer, grammar, a_call(tokenizer, family, COUNT))
    assert not allows(tokenizer, grammar, a_call(tokenizer, family, FREE))


def test_parameters_that_refer_to_their_own_definitions(tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"], "$defs": {"n": NUMBER}}
    grammar = call_grammar(PLAIN, {"count": schema}, SPECIALS, content=CONTENT)
    assert allows(tokenizer, grammar, '{"name": "count", "arguments": {"n": 7}}')
    assert not allows(tokenizer, grammar, '{"name": "count", "arguments": {"n": 77}}')
