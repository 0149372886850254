"""GBNF and EBNF grammars accept what llama.cpp accepts for them, and a bad one says where it is bad."""

from __future__ import annotations

from typing import Any

import llguidance
import pytest

from penstock.errors import InvalidGrammar
from penstock.text.grammar.gbnf import to_lark

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws   # a comment
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (expr "=" term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= num | "(" expr ")"
num   ::= [0-9]+
"""
CHESS = r"""
# the first move is the first
root    ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move    ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?
"""
CODE = r"""
root ::= declaration*
declaration ::= type identifier "(" (type identifier)? ")" "{" statement* "}"
type ::= ("int" | "float") ws
identifier ::= [a-zA-Z_] [a-zA-Z_0-9]*
statement ::=
    ( identifier ws "=" ws expression ";" ) |
    ( "return" ws expression ";" ) |
    ( "while" "(" expression ("<=" | "<") expression ")" "{" statement* "}" ) |
    ( "//" [^\n]* "\n" ) |
    ( "/*" ( [^*] | ("*" [^/]) )* "*/" )
expression ::= factor (("+" | "*") factor)*
factor ::= identifier | [0-9]+ | "-" factor | "(" expression ")"
ws ::= [ \t\n]+
"""
CASES = {
    "json": (JSON, ['{"a": [1, -2.5e+3, "x\\n\\u00e9"], "b": {"c": null}}', "{}"], ['{"a": }', "[1]", '{"a": "\x01"}']),
    "arithmetic": (ARITHMETIC, ["1+2=3\n", "(1-2)*4=4\n1=1\n"], ["1+=3\n", "1+2=3", ""]),
    "list": (r'root ::= ("- " [^\r\n\x0b\x85\u2028]+ "\n")+', ["- a\n- é ü\n"], ["a\n", "- a", "- a\u2028\n"]),
    "chess": (CHESS, ["1. e4 e5\n2. Nf3 Nc6\n3. O-O O-O-O+\n"], ["1. e4\n", "1. e4 e9\n"]),
    "code": (
        CODE,
        ["int main(){return 0;}", "int f(int x){while(x<=10){x = x+1;}// hi\n/* a*b */return -x;}"],
        ["main(){}", "int main(){return}"],
    ),
    "longest match": ('root ::= [a-z]* "end"', ["end", "endend", "weekend"], ["ende", ""]),
    "overlap": ('root ::= "a" "bc" | "ab" "d"', ["abc", "abd"], ["ab"]),
    "repeats": (
        'root ::= "ab"{2} [0-9]{2,3} "c"{,2} "d"{1,} "e"{0}',
        ["abab12d", "abab123ccdd"],
        ["ab12d", "abab1d", "abab12ccc", "abab12de"],
    ),
    "groups": ('root ::= (("a" | ("b" "c")+)? "d")*', ["", "d", "add", "bcbcd"], ["a", "bd"]),
    "any": ("root ::= . . [^]", ["a\né"], ["ab", "abcd"]),
    "escapes": (r'root ::= "\x41\u00e9\U0001F601\t\\\"\[\]" [\]\-\\^]', ['Aé😁\t\\"[]]', 'Aé😁\t\\"[]^'], ["A"]),
    "dash": ("root ::= [-a] [a-] [+--]", ["--,", "aa-", "-a+"], ["b-,"]),
    "lines": ('root ::= a\n  | b\na ::=\n  "a"\nb ::= "b" root?', ["a", "ba", "bba", "b"], ["ab", ""]),
    "left recursion": ('root ::= "a" | root "b"', ["a", "abb"], ["b"]),
    "single quotes": ("root ::= 'it''s' | \"x\"", ["its", "x"], ["it"]),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return llguidance.LLTokenizer("byte")


def accepts(tokenizer: Any, lark: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES.values(), ids=CASES.keys())
def test_what_a_grammar_accepts(tokenizer: Any, grammar: str, good: list[str], bad: list[str]) -> None:
    lark = to_lark(grammar)
    assert [text for text in good if not accepts(tokenizer, lark, text)] == []
    assert [text for text in bad if accepts(tokenizer, lark, text)] == []


def test_special_tokens_are_read_where_they_are_spelled(tokenizer: Any) -> None:
    """Token 65 stands for the marker here."""
    lark = to_lark('root ::= "<call>" "x" | <[66]>', {"<call>": 65})
    assert accepts(tokenizer, lark, "<call>x")
    assert accepts(tokenizer, lark, "Ax")
    assert accepts(tokenizer, lark, "B")
    assert not accepts(tokenizer, lark, "Bx")


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('root ::= "a" other', r"the rule 'other' is not defined \(line 1, column 14\)"),
        ('main ::= "a"', "the rule 'root' is not defined"),
        ("", "the rule 'root' is not defined"),
        ('root ::= "a\n', r"'\"' cannot be read \(line 1, column 10\)"),
        ('root ::= "a"\nb ::= ("x"', r"does not close \(line 2, column 7\)"),
        ('root ::= "a")', r"'\)' has no place here \(line 1, column 13\)"),
        ('"a"', "expected a rule"),
        ("root ::= *", "nothing comes before it"),
        ("root ::= []", "empty"),
        ("root ::= [z-a]", "the range 'z' to 'a' is empty"),
        (r'root ::= "\q"', "the escape '.q' is unknown"),
        (r'root ::= "\uD800"', "is not a character"),
        ('root ::= "a"{5000}', "more than 2000 times"),
        ('root ::= "a"{3,2}', "has no number of times"),
        ('root ::= "a"\nroot ::= "b"', r"'root' is defined twice \(line 2, column 1\)"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "more than 100 groups"),
        ("root ::= a @ b", r"'@' cannot be read \(line 1, column 12\)"),
    ],
)
def test_a_bad_grammar_says_where(grammar: str, problem: str) -> None:
    with pytest.raises(InvalidGrammar, match=problem):
        to_lark(grammar)
