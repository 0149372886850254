"""Structural tags allow free text, and hold what a trigger begins to its schema."""

from __future__ import annotations

from typing import Any

import llguidance
import pytest

from penstock.errors import InvalidGrammar
from penstock.text.grammar.structural_tag import to_lark
from tests.text.test_gbnf import accepts

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
WORD = {"enum": ["a", "b"]}
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=one>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=two>", "schema": WORD, "end": "</f>"},
        {"begin": "[g]", "schema": WORD, "end": ""},
    ],
    "triggers": ["<f=", "["],
}
JSON_TAG = {"type": "tag", "begin": "<j>", "content": {"type": "json_schema", "json_schema": NUMBER}, "end": "</j>"}
TEXT_TAG = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
TALK = 'Well, <f=one>{"n": 1}</f> and <f=two>"a"</f>[g]"b" end <'
TRIGGERED = {"type": "triggered_tags", "triggers": ["<j", "<t"], "tags": [JSON_TAG, TEXT_TAG]}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


CASES = {
    "older": (OLD, ["no call", TALK], ["<f=three>", '<f=two>"c"</f>', '<f=one>{"n": 1}', "[h]"]),
    "triggered": ({"format": TRIGGERED}, ["", 'x <j>{"n":2}</j><t>any <j</t>'], ["<j>{}</j>", "<t>open", "<x <jx"]),
    "at least one": ({"format": TRIGGERED | {"at_least_one": True}}, ["a<t></t>b"], ["", "a"]),
    "first": ({"format": TRIGGERED | {"stop_after_first": True}}, ["", "a", "a<t></t>"], ["a<t></t>b"]),
    "sequence": (
        {"format": {"type": "sequence", "elements": [const("A"), {"type": "regex", "pattern": "[0-9]/+"}, TEXT_TAG]}},
        ["A1/<t>x</t>"],
        ["A<t>x</t>", "A1/"],
    ),
    "text and a constant": (
        {"format": {"type": "sequence", "elements": [{"type": "any_text"}, const("END"), const("!")]}},
        ["thoughts END!", "END!"],
        ["thoughts END", "END and END!"],
    ),
    "or": ({"format": {"type": "or", "elements": [const("yes"), const("no")]}}, ["yes", "no"], ["yesno"]),
    "times": (
        {"format": {"type": "sequence", "elements": [{"type": "star", "content": const("a")}]}},
        ["", "aaa"],
        ["b"],
    ),
    "optional": ({"format": {"type": "optional", "content": const("a")}}, ["", "a"], ["aa"]),
    "plus": ({"format": {"type": "plus", "content": const("a")}}, ["a", "aa"], [""]),
    "grammar": ({"format": {"type": "grammar", "grammar": 'root ::= [a-z]* "end"'}}, ["bend", "endend"], ["en"]),
    "separated": (
        {"format": {"type": "tags_with_separator", "tags": [JSON_TAG, TEXT_TAG], "separator": ", "}},
        ["", '<j>{"n": 1}</j>, <t></t>, <t>x</t>'],
        ["<t></t>,<t></t>"],
    ),
    "several ends": (
        {"format": {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": [">", "/"]}},
        ["<a>", "<a/"],
        ["<a"],
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return llguidance.LLTokenizer("byte")


@pytest.mark.parametrize(("tag", "good", "bad"), CASES.values(), ids=CASES.keys())
def test_what_a_tag_accepts(tokenizer: Any, tag: dict[str, Any], good: list[str], bad: list[str]) -> None:
    lark = to_lark(tag, {}, lambda schema: schema)
    assert [text for text in good if not accepts(tokenizer, lark, text)] == []
    assert [text for text in bad if accepts(tokenizer, lark, text)] == []


def test_special_tokens_are_named_by_id() -> None:
    """Text never contains them, so the model must say the token."""
    lark = to_lark(OLD, {"<f=": 300, "</f>": 301}, lambda schema: schema)
    assert "<[300]>" in lark
    assert "<[301]>" in lark


@pytest.mark.parametrize(
    ("tag", "problem"),
    [
        ({}, "format must be an object"),
        ({"structures": [], "triggers": "x"}, "triggers must be a list"),
        ({"structures": [{"begin": "a", "schema": {}}], "triggers": ["a"]}, r"structures\[0\].end must be a text"),
        ({"structures": [], "triggers": ["a"]}, "no tag begins with the trigger 'a'"),
        ({"structures": [*OLD["structures"]], "triggers": ["<f="]}, "no trigger begins the tag"),
        ({"format": {"type": "poem"}}, "format.type is not supported with this value: 'poem'"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, TEXT_TAG]}}, "any_text must be last"),
        ({"format": {"type": "or", "elements": [3]}}, r"format.elements\[0\] must be an object"),
    ],
)
def test_a_bad_tag_says_where(tag: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidGrammar, match=problem):
        to_lark(tag, {}, lambda schema: schema)


def test_nesting_is_bounded() -> None:
    deep: dict[str, Any] = const("a")
    for _ in range(200):
        deep = {"type": "optional", "content": deep}
    with pytest.raises(InvalidGrammar, match="nested too deep"):
        to_lark({"format": deep}, {}, lambda schema: schema)
