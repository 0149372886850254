"""Reads the arguments of a call incrementally and emits them as JSON. They are written as JSON, as separate parameters,
or in Gemma's notation.

Each reader returns True if the arguments are complete. If they are malformed or cut off, the emitted text is the
beginning of a JSON text, and the rest stays in the reader.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.text.streaming_reader import Emit, Reading, StreamingReader
from penstock.text.tool_formats import CallSyntax

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


# ---- JSON ----


def json_value(source: StreamingReader, emit: Emit) -> Reading[bool]:
    """Emits one JSON value unchanged, except that raw line breaks and stray backslashes in strings are escaped."""
    closing: list[str] = []
    expected = "v"  # v value, a value or end, k key, o key or end, : colon, "," comma or end
    while True:
        emit((yield from source.space()))
        character = yield from source.peek()
        if not character:
            return False
        if expected in "ao," and closing and character == closing[-1]:
            emit(source.take(1))
            closing.pop()
            expected = ","
        elif character == expected == ",":
            emit(source.take(1))
            expected = "k" if closing[-1] == "}" else "v"
        elif character == expected == ":":
            emit(source.take(1))
            expected = "v"
        elif character == '"' and expected in "vako":
            if not (yield from json_string(source, emit)):
                return False
            expected = ":" if expected in "ko" else ","
        elif character in "{[" and expected in "va" and len(closing) < MAX_DEPTH:
            emit(source.take(1))
            closing.append("}" if character == "{" else "]")
            expected = "o" if character == "{" else "a"
        elif expected in "va":
            if not (yield from _scalar(source, emit)):
                return False
            expected = ","
        else:
            return False
        if not closing and expected == ",":
            return True


def json_string(source: StreamingReader, emit: Emit) -> Reading[bool]:
    emit(source.take(1))
    while character := (yield from source.peek()):
        if character == '"':
            emit(source.take(1))
            return True
        if character == "\\":
            yield from _escape(source, emit)
        else:
            emit(source.take_available(_PLAIN) or escaped(source.take(1)))
    return False


def _escape(source: StreamingReader, emit: Emit) -> Reading[None]:
    """Emits an escape; doubles a stray backslash."""
    emit(source.take(1))
    source.mark()
    escape = source.take(1) if (yield from source.peek()) else ""
    if escape == "u":
        escape += yield from source.take_run(_HEX, 4)
    whole = _ESCAPE.fullmatch(escape) is not None
    if not whole and escape[:1] in ("", "u"):
        whole = not (yield from source.peek())  # False if the text ended within the escape
    if whole:
        source.release()
        emit(escape)
    else:
        source.rewind()
        emit("\\")


def _scalar(source: StreamingReader, emit: Emit) -> Reading[bool]:
    """Emits a number, true, false or null; at the end of the text, possibly only its beginning."""
    source.mark()
    word = yield from source.take_run(_WORD, 400)
    cut = not (yield from source.peek())
    if _is_scalar(word) or (cut and word and _may_be_scalar(word)):
        source.release()
        emit(word)
        return not cut
    source.rewind()
    return False


def _is_scalar(word: str) -> bool:
    return word in ("true", "false", "null") or _NUMBER.fullmatch(word) is not None


def _may_be_scalar(word: str) -> bool:
    return any(each.startswith(word) for each in ("true", "false", "null")) or bool(_BEGUN_NUMBER.fullmatch(word))


# ---- separate parameters ----


def parameters(source: StreamingReader, syntax: CallSyntax, schema: Mapping[str, Any], emit: Emit) -> Reading[bool]:
    """Emits arguments that have markers of their own, and consumes the call's tail. `schema` has their types."""
    assert syntax.parameter is not None
    opening, endings = syntax.parameter
    properties = schema.get("properties")
    before = "{"
    while (fields := (yield from source.match(f" {opening}"))) is not None:
        emit(f'{before}"{escaped(fields["key"])}": ')
        before = ", "
        types = _types(properties, fields)
        if not (yield from _parameter(source, endings, types, emit)):
            return False
    if (yield from source.match(f" {syntax.tail}")) is None:
        emit(before.strip(", "))
        return False
    emit("{}" if before == "{" else "}")
    return True


def _parameter(source: StreamingReader, endings: tuple[str, ...], types: set[str], emit: Emit) -> Reading[bool]:
    if endings[0].startswith("\n"):
        yield from source.match_literal("\n")
    if types == {"string"}:
        return (yield from _text(source, endings, emit))
    written: list[str] = []
    end = yield from source.until(endings, written.append)
    source.take(len(end))
    value = _as_json("".join(written), types)
    emit(value if end else value.removesuffix('"'))
    return end != ""


def _text(source: StreamingReader, endings: tuple[str, ...], emit: Emit) -> Reading[bool]:
    emit('"')
    end = yield from source.until(endings, lambda text: emit(escaped(text)))
    if end:
        source.take(len(end))
        emit('"')
    return end != ""


def _types(properties: object, fields: Mapping[str, str]) -> set[str]:
    """Returns a parameter's JSON types from the call or else its schema; empty if unknown."""
    if "string" in fields:
        return {"string"} if fields["string"] == "true" else set()
    schema = properties.get(fields["key"]) if isinstance(properties, dict) else None
    return _types_in(schema) if isinstance(schema, dict) else set()


def _types_in(schema: Mapping[str, Any]) -> set[str]:
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared) if isinstance(declared, list) else set()
    for name in ("anyOf", "oneOf"):
        for each in schema.get(name) or ():
            types |= _types_in(each) if isinstance(each, dict) else set()
    return types


def _as_json(text: str, types: set[str]) -> str:
    """Converts a value that need not be a string to JSON: from JSON, a Python literal, or else a string."""
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
    """Converts a Python literal to JSON: some templates, and so their models, write objects like Python."""
    try:
        return json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return f'"{escaped(text)}"'


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# ---- Gemma's notation ----


def gemma_value(source: StreamingReader, quote: str, emit: Emit, depth: int = 0) -> Reading[bool]:
    """Emits a value in Gemma's notation: objects have bare keys, and strings are enclosed in `quote`s."""
    yield from source.space()
    if (yield from source.match_literal(quote)):
        return (yield from _text(source, (quote,), emit))
    character = yield from source.peek()
    if character in ("{", "[") and depth < MAX_DEPTH:
        return (yield from _gemma_container(source, quote, emit, depth))
    word = yield from source.take_run(_WORD, 400)
    emit(word if _is_scalar(word) else "null" if word == "None" else f'"{escaped(word)}"' if word else "")
    return word != "" and (yield from source.peek()) != ""


def _gemma_container(source: StreamingReader, quote: str, emit: Emit, depth: int) -> Reading[bool]:
    opening = source.take(1)
    emit(opening)
    closing, before = "}" if opening == "{" else "]", ""
    while (yield from source.match(f" {closing}")) is None:
        if before and (yield from source.match(" ,")) is None:
            return False
        if opening == "{":
            key = yield from _gemma_key(source, quote)
            if key is None:
                return False
            emit(f'{before}"{escaped(key)}": ')
        else:
            emit(before)
        before = ", "
        if not (yield from gemma_value(source, quote, emit, depth + 1)):
            return False
    emit(closing)
    return True


def _gemma_key(source: StreamingReader, quote: str) -> Reading[str | None]:
    fields = yield from source.match(f" {quote}{{key}}{quote} :")
    if fields is None and (fields := (yield from source.match(" {word} :"))) is None:
        return None
    return fields.get("key") or fields["word"]
