"""Translates llama.cpp's GBNF, and SGLang's and xgrammar's EBNF, to llguidance's Lark.

These notations are about characters. A lexer that takes the longest match would misread `[a-z]* "end"`, so every
character becomes its own terminal, and the parser keeps all readings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from penstock.errors import InvalidGrammar

MAX_REPEAT = 2000
MAX_DEPTH = 100  # nested groups
ROOT = "root"
ANY_CHARACTER = r"/(?s:.)/"

_SYMBOLS = re.compile(
    r"""(?P<space>(?:[ \t\r\n]|\#[^\n]*)+)
    |(?P<define>(?P<defined>[\w-]+)[ \t\r\n]*::=)
    |(?P<name>[\w-]+)
    |(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<set>\[(?:[^\]\\]|\\.)*\])
    |(?P<token><\[\d+\]>|<[^<>\s\[\]]+>)
    |(?P<repeat>\{\s*\d*\s*(?:,\s*\d*\s*)?\}|[*+?])
    |(?P<mark>[.()|])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}


class Symbol(NamedTuple):
    """Represents one symbol of a grammar's text."""

    kind: str
    text: str
    at: int


def to_lark(grammar: str, special: Mapping[str, int] | None = None) -> str:
    """Translates a grammar to Lark; raises InvalidGrammar with the position of an error. Texts that spell one of the
    `special` tokens may also be generated as that token.
    """
    return _Translation(grammar, special or {}).lark()


class _Translation:
    """Reads one grammar, rule by rule."""

    def __init__(self, grammar: str, special: Mapping[str, int]) -> None:
        self._grammar = grammar
        self._special = {tuple(map(ord, text)): id for text, id in special.items() if text in grammar}
        self._symbols = self._read_symbols()
        self._next = 0
        self._depth = 0
        self._rules = {symbol.text: f"r{index}" for index, symbol in enumerate(self._of_kind("define"))}
        self._used: dict[str, int] = {ROOT: 0}  # rule name: position of its first use

    def lark(self) -> str:
        lines = [f"start: {self._rules.get(ROOT, '')}"]
        defined: set[str] = set()
        while self._peek():
            name = self._take("define", "a rule, which is written name ::= ...")
            if name.text in defined:
                self._fail(f"the rule {name.text!r} is defined twice", name.at)
            defined.add(name.text)
            lines.append(f"{self._rules[name.text]}: {self._alternatives()}")
            if (left := self._peek()) and left.kind != "define":
                self._fail(f"{left.text!r} has no place here", left.at)
        for missing, at in self._used.items():
            if missing not in defined:
                self._fail(f"the rule {missing!r} is not defined", at)
        return "\n".join(lines)

    # ---- parts of a rule ----

    def _alternatives(self) -> str:
        written = [self._sequence()]
        while (symbol := self._peek()) and symbol.text == "|" and symbol.kind == "mark":
            self._next += 1
            written.append(self._sequence())
        return " | ".join(written)

    def _sequence(self) -> str:
        written = []
        while (symbol := self._peek()) and symbol.kind != "define" and symbol.text not in ("|", ")"):
            item = self._item(symbol)
            while (repeat := self._peek()) and repeat.kind == "repeat":
                self._next += 1
                item = self._repeated(item, repeat)
            written.append(item)
        return " ".join(each for each in written if each) or '""'

    def _item(self, symbol: Symbol) -> str:
        self._next += 1
        match symbol.kind:
            case "name":
                self._used.setdefault(symbol.text, symbol.at)
                return self._rules.get(symbol.text, "")
            case "text":
                return self._spelled([character for character, _ in self._characters(symbol)])
            case "set":
                return self._set(symbol)
            case "token":
                return symbol.text
        if symbol.text == ".":
            return ANY_CHARACTER
        if symbol.text != "(":
            self._fail(f"{symbol.text!r} has no place here: nothing comes before it", symbol.at)
        return self._group(symbol)

    def _group(self, opening: Symbol) -> str:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"more than {MAX_DEPTH} groups are nested", opening.at)
        inner = self._alternatives()
        closing = self._peek()
        if closing is None or closing.text != ")":
            self._fail("the group that opens here does not close", opening.at)
        self._next += 1
        self._depth -= 1
        return f"({inner})"

    def _repeated(self, item: str, repeat: Symbol) -> str:
        if len(repeat.text) == 1:
            return f"({item}){repeat.text}"
        low, comma, high = repeat.text[1:-1].partition(",")
        least = int(low or 0)
        most = int(high) if high.strip() else None if comma else least
        if max(least, most or 0) > MAX_REPEAT:
            self._fail(f"a repetition of more than {MAX_REPEAT} times", repeat.at)
        if most is not None and most < least:
            self._fail(f"the repetition {repeat.text} has no number of times", repeat.at)
        if most == 0:
            return '""'
        return f"({item}){{{least},{'' if most is None else most}}}"

    def _set(self, symbol: Symbol) -> str:
        characters = self._characters(symbol)
        negated = symbol.text.startswith("[^")
        characters = characters[1:] if negated else characters
        if not characters:
            if negated:
                return ANY_CHARACTER
            self._fail("the set of characters is empty", symbol.at)
        ranges, at = [], 0
        while at < len(characters):
            first = last = characters[at][0]
            if at + 2 < len(characters) and characters[at + 1] == (ord("-"), False):
                last = characters[at + 2][0]
                at += 2
            if last < first:
                self._fail(f"the range {chr(first)!r} to {chr(last)!r} is empty", symbol.at)
            ranges.append(_point(first) if first == last else f"{_point(first)}-{_point(last)}")
            at += 1
        return f"/[{'^' if negated else ''}{''.join(ranges)}]/"

    def _characters(self, symbol: Symbol) -> list[tuple[int, bool]]:
        """Returns the code points between quotes or brackets, and whether each was escaped."""
        text, characters, at = symbol.text[1:-1], list[tuple[int, bool]](), 0
        while at < len(text):
            found = _ESCAPE.match(text, at)
            if found is None:
                if text[at] == "\\":
                    self._fail(f"the escape {text[at : at + 2]!r} is not complete", symbol.at)
                characters.append((ord(text[at]), False))
                at += 1
                continue
            digits = found[1] or found[2] or found[3]
            characters.append((int(digits, 16) if digits else self._escaped(found[4], symbol.at), True))
            if characters[-1][0] > 0x10FFFF or 0xD800 <= characters[-1][0] < 0xE000:
                self._fail(f"the escape {found[0]!r} is not a character", symbol.at)
            at = found.end()
        return characters

    def _escaped(self, character: str, at: int) -> int:
        if character.isalnum() and character not in _NAMED:
            self._fail(f"the escape '\\{character}' is unknown", at)
        return ord(_NAMED.get(character, character))

    def _spelled(self, characters: list[int]) -> str:
        """Returns a text as Lark: a terminal per character, with special tokens as alternatives."""
        written, at = [], 0
        while at < len(characters):
            tokens = [text for text in self._special if tuple(characters[at : at + len(text)]) == text]
            token = max(tokens, key=len, default=(characters[at],))
            spelled = " ".join(f"/{_point(character)}/" for character in token)
            written.append(f"(<[{self._special[token]}]> | {spelled})" if tokens else spelled)
            at += len(token)
        return f"({' '.join(written)})" if len(written) > 1 else "".join(written) or '""'

    # ---- symbols ----

    def _read_symbols(self) -> list[Symbol]:
        symbols, at = [], 0
        while at < len(self._grammar):
            found = _SYMBOLS.match(self._grammar, at)
            if found is None:
                self._fail(f"{self._grammar[at]!r} cannot be read", at)
            kind = found.lastgroup if found["define"] is None else "define"
            if kind != "space":
                symbols.append(Symbol(kind or "", found["defined"] or found[0], at))
            at = found.end()
        return symbols

    def _of_kind(self, kind: str) -> list[Symbol]:
        return [symbol for symbol in self._symbols if symbol.kind == kind]

    def _peek(self) -> Symbol | None:
        return self._symbols[self._next] if self._next < len(self._symbols) else None

    def _take(self, kind: str, expected: str) -> Symbol:
        symbol = self._peek()
        if symbol is None or symbol.kind != kind:
            self._fail(f"expected {expected}", symbol.at if symbol else len(self._grammar))
        self._next += 1
        return symbol

    def _fail(self, problem: str, at: int) -> NoReturn:
        before = self._grammar[:at]
        line, column = before.count("\n") + 1, at - (before.rfind("\n") + 1) + 1
        raise InvalidGrammar(f"the grammar cannot be read: {problem} (line {line}, column {column})")


def _point(character: int) -> str:
    return f"\\x{{{character:X}}}"
