"""A grammar that is rewritten for JSON strings accepts the same texts there as the original accepts alone."""

from __future__ import annotations

import re
from typing import Any

import llguidance
import pytest

from penstock.errors import InvalidGrammar
from penstock.text.quoted_grammar import in_json_string

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk  // of a file
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
FILE = '*** Begin Patch\n*** Add File: a"b".py\n+print("h\\n")\tü\n+\n*** End Patch'
CASES: dict[str, tuple[str, list[str], list[str]]] = {  # a grammar, texts that match it, and others
    "patch": (PATCH, [FILE, FILE + "\n"], ["*** Begin Patch\n", FILE.replace("+", "-"), "x" + FILE]),
    "texts": (r'start: "a\"b" "\\" "\n"', ['a"b\\\n'], ["a'b\\\n"]),
    "any case": (r'start: "ab"i /["x]+/i', ['Ab"X'], ['Ab"Y']),
    "sets": (r"start: /[^\n]*x|[!-~]{2}/", ['"\\x', "!\\"], ["\n", "é!"]),
    "classes": (r"start: /\s\S\W\D\w\d/", ['\n""\\a1'], ['\n""\\a"']),
    "no line break": ("start: /./", ['"', "\\", "é"], ["\n", "ab"]),
    "any character": ("start: /./s", ['"', "\\", "\n"], ["ab"]),
    "ranges": (r'start: "!".."#" WS INT' + "\n%import common.WS\n%import common (INT)", ['"\n\t1', "! 12"], ["$ 1"]),
    "strings": ('start: S "," S\n%import common.ESCAPED_STRING -> S', [r'"a\"b","c"'], ['"a,"c"', "'a','b'"]),
    "slashes": (r"start: /a\/[\/\\]/", ["a//", "a/\\"], ["a/b"]),
    "repetition": ('start: A~2..3 B{2}\nA: "\\""\nB: /[a-c]/', ['""ab', '"""cc'], ['"ab', '""ad']),
    "comments": ('start: "#" "//" # one\n// two', ["#//"], ["#"]),
}


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("grammar", "matching", "others"), CASES.values(), ids=CASES.keys())
def test_the_same_texts_match(grammar: str, matching: list[str], others: list[str]) -> None:
    quoted = f'start: "\\"" text "\\""\ntext: %lark {{\n{in_json_string(grammar)}\n}}'
    for text in (*matching, *others):
        within = re.sub(r'["\\]', lambda found: "\\" + found[0], text)
        assert accepts(grammar, text) == accepts(quoted, f'"{within}"') == (text in matching), text


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ("start: A\nA: ~/a/", "'~'"),
        ("start: <|end|>", "'<|end|>'"),
        ('start: %json {"type": "object"}', "'%json'"),
        ("start: @other", "'@other'"),
        ("start: /a b/x", "the flag x"),
        (r'start: "\q"', "an escape that is unknown"),
    ],
)
def test_what_has_no_equivalent_is_named(grammar: str, named: Any) -> None:
    with pytest.raises(InvalidGrammar, match=re.escape(named)):
        in_json_string(grammar)
