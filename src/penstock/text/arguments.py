"""The arguments of a call as they come, passed on as JSON: written as JSON, one by one, or in Gemma's notation.

Each reader says whether the arguments came to their end. Where they stop being well formed, or stop, what was passed on
is the beginning of a JSON text, and what was not is left to be read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.text.streaming_reader import Incoming, Say, Wait
from penstock.text.tool_formats import Calls

MAX_DEPTH = 64
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_BEGUN_NUMBER = re.compile(r"-?\d*\.?\d*([eE][+-]?\d*)?")
_WORD = re.compile(r"[-+.\w]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'["\\/bfnrt]|u[0-9a-fA-F]{4}')
_HEX = re.compile(r"[0-9a-fA-F]+")
_WORDS = {"boolean": {"true": "true", "false": "false"}, "null": {"none": "null", "null": "null"}}


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


# -- JSON ---------------------------------------------------------------------------------------------------------


def json_value(source: Incoming, say: Say) -> Wait[bool]:
    """Passes one JSON value on as it is written; raw line breaks and lone backslashes in strings are escaped."""
    closing: list[str] = []
    expected = "v"  # v value, a value or end, k key, o key or end, : colon, "," comma or end
    while True:
        say((yield from source.space()))
        character = yield from source.peek()
        if not character:
            return False
        if expected in "ao," and closing and character == closing[-1]:
            say(source.take(1))
            closing.pop()
            expected = ","
        elif character == expected == ",":
            say(source.take(1))
            expected = "k" if closing[-1] == "}" else "v"
        elif character == expected == ":":
            say(source.take(1))
            expected = "v"
        elif character == '"' and expected in "vako":
            if not (yield from json_string(source, say)):
                return False
            expected = ":" if expected in "ko" else ","
        elif character in "{[" and expected in "va" and len(closing) < MAX_DEPTH:
            say(source.take(1))
            closing.append("}" if character == "{" else "]")
            expected = "o" if character == "{" else "a"
        elif expected in "va":
            if not (yield from _word(source, say)):
                return False
            expected = ","
        else:
            return False
        if not closing and expected == ",":
            return True


def json_string(source: Incoming, say: Say) -> Wait[bool]:
    say(source.take(1))
    while character := (yield from source.peek()):
        if character == '"':
            say(source.take(1))
            return True
        if character == "\\":
            yield from _escape(source, say)
        else:
            say(source.come(_PLAIN) or escaped(source.take(1)))
    return False


def _escape(source: Incoming, say: Say) -> Wait[None]:
    """A backslash is doubled where no escape follows it."""
    say(source.take(1))
    source.hold()
    escape = source.take(1) if (yield from source.peek()) else ""
    if escape == "u":
        escape += yield from source.run(_HEX, 4)
    whole = _ESCAPE.fullmatch(escape) is not None
    if not whole and escape[:1] in ("", "u"):
        whole = not (yield from source.peek())  # the text was cut within it
    if whole:
        source.release()
        say(escape)
    else:
        source.back()
        say("\\")


def _word(source: Incoming, say: Say) -> Wait[bool]:
    """A number, true, false or null; at the end of the text, the beginning of one."""
    source.hold()
    word = yield from source.run(_WORD, 400)
    cut = not (yield from source.peek())
    if _is_word(word) or (cut and word and _may_be_word(word)):
        source.release()
        say(word)
        return not cut
    source.back()
    return False


def _is_word(word: str) -> bool:
    return word in ("true", "false", "null") or _NUMBER.fullmatch(word) is not None


def _may_be_word(word: str) -> bool:
    return any(each.startswith(word) for each in ("true", "false", "null")) or bool(_BEGUN_NUMBER.fullmatch(word))


# -- one by one ---------------------------------------------------------------------------------------------------


def parameters(source: Incoming, calls: Calls, schema: Mapping[str, Any], say: Say) -> Wait[bool]:
    """Parameters between markers of their own, up to and with the call's tail; `schema` tells their types."""
    assert calls.parameter is not None
    opening, endings = calls.parameter
    properties = schema.get("properties")
    before = "{"
    while (fields := (yield from source.match(f" {opening}"))) is not None:
        say(f'{before}"{escaped(fields["key"])}": ')
        before = ", "
        types = _types(properties, fields)
        if not (yield from _parameter(source, endings, types, say)):
            return False
    if (yield from source.match(f" {calls.tail}")) is None:
        say(before.strip(", "))
        return False
    say("{}" if before == "{" else "}")
    return True


def _parameter(source: Incoming, endings: tuple[str, ...], types: set[str], say: Say) -> Wait[bool]:
    if endings[0].startswith("\n"):
        yield from source.match_literal("\n")
    if types == {"string"}:
        return (yield from _text(source, endings, say))
    written: list[str] = []
    end = yield from source.until(endings, written.append)
    source.take(len(end))
    value = _as_json("".join(written), types)
    say(value if end else value.removesuffix('"'))
    return end != ""


def _text(source: Incoming, endings: tuple[str, ...], say: Say) -> Wait[bool]:
    say('"')
    end = yield from source.until(endings, lambda text: say(escaped(text)))
    if end:
        source.take(len(end))
        say('"')
    return end != ""


def _types(properties: object, fields: Mapping[str, str]) -> set[str]:
    """What a parameter may be: as the call says, or else its schema; empty where neither does."""
    if "string" in fields:
        return {"string"} if fields["string"] == "true" else set()
    schema = properties.get(fields["key"]) if isinstance(properties, dict) else None
    return _types_in(schema) if isinstance(schema, dict) else set()


def _types_in(schema: Mapping[str, Any]) -> set[str]:
    told = schema.get("type")
    types = {told} if isinstance(told, str) else set(told) if isinstance(told, list) else set()
    for name in ("anyOf", "oneOf"):
        for each in schema.get(name) or ():
            types |= _types_in(each) if isinstance(each, dict) else set()
    return types


def _as_json(text: str, types: set[str]) -> str:
    """A value that is not told to be a string: JSON as it stands, a word of Python's, or else a string."""
    word = text.strip().lower()
    for kind in types & _WORDS.keys():
        if word in _WORDS[kind]:
            return _WORDS[kind][word]
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _python_as_json(text) if types & {"object", "array"} else f'"{escaped(text)}"'
    return f'"{escaped(text)}"' if isinstance(value, str) and "string" in types else text.strip()


def _python_as_json(text: str) -> str:
    """Some templates, and so their models, put objects down as Python does."""
    try:
        return json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return f'"{escaped(text)}"'


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# -- Gemma's notation ---------------------------------------------------------------------------------------------


def noted_value(source: Incoming, quote: str, say: Say, depth: int = 0) -> Wait[bool]:
    """Objects with bare keys, strings between `quote`s."""
    yield from source.space()
    if (yield from source.match_literal(quote)):
        return (yield from _text(source, (quote,), say))
    character = yield from source.peek()
    if character in ("{", "[") and depth < MAX_DEPTH:
        return (yield from _noted_many(source, quote, say, depth))
    word = yield from source.run(_WORD, 400)
    say(word if _is_word(word) else "null" if word == "None" else f'"{escaped(word)}"' if word else "")
    return word != "" and (yield from source.peek()) != ""


def _noted_many(source: Incoming, quote: str, say: Say, depth: int) -> Wait[bool]:
    opening = source.take(1)
    say(opening)
    closing, before = "}" if opening == "{" else "]", ""
    while (yield from source.match(f" {closing}")) is None:
        if before and (yield from source.match(" ,")) is None:
            return False
        if opening == "{":
            key = yield from _noted_key(source, quote)
            if key is None:
                return False
            say(f'{before}"{escaped(key)}": ')
        else:
            say(before)
        before = ", "
        if not (yield from noted_value(source, quote, say, depth + 1)):
            return False
    say(closing)
    return True


def _noted_key(source: Incoming, quote: str) -> Wait[str | None]:
    fields = yield from source.match(f" {quote}{{key}}{quote} :")
    if fields is None and (fields := (yield from source.match(" {word} :"))) is None:
        return None
    return fields.get("key") or fields["word"]
