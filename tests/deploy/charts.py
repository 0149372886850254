"""Renders the templates of a Helm chart, as far as ours go: values, if, range, and the functions that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "quote": lambda value: json.dumps(str(value)),
    "int": int,
    "add": lambda *numbers: sum(map(int, numbers)),
    "gt": lambda one, other: one > other,
}


def render(template: str, values: dict[str, Any], release: str = "here") -> str:
    """Returns the text of a template. Raises if it has something else than these parts."""
    scope = {"Values": values, "Release": {"Name": release}}
    pieces = re.split(r"(\{\{.*?\}\})", re.sub(r"[ \t]*\n[ \t]*\{\{-", "{{-", template))
    text, rest = _block(pieces, scope)
    assert not rest, f"an end without a beginning: {rest[:3]}"
    return text


def _block(pieces: list[str], dot: Any, shown: bool = True) -> tuple[str, list[str]]:
    """Returns the text up to the end of a block, and what comes after it, that end included."""
    out = []
    while pieces:
        piece, *pieces = pieces
        if not piece.startswith("{{"):
            out.append(piece)
            continue
        words = piece.strip("{}-").strip()
        if words in ("end", "else"):
            return "".join(out), [piece, *pieces]
        if words.startswith("if "):
            text, pieces = _conditional(pieces, dot, bool(_value(words[3:], dot)) if shown else False, shown)
            out.append(text)
        elif words.startswith("range "):
            body = pieces
            for item in _value(words[6:], dot) if shown else ():
                out.append(_block(body, item)[0])
            pieces = _block(body, None, shown=False)[1][1:]
        else:
            out.append(str(_value(words, dot)) if shown else "")
    return "".join(out), []


def _conditional(pieces: list[str], dot: Any, true: bool, shown: bool) -> tuple[str, list[str]]:
    text, pieces = _block(pieces, dot, shown and true)
    chosen = text if true else ""
    if pieces[0].strip("{}-").strip() == "else":
        text, pieces = _block(pieces[1:], dot, shown and not true)
        chosen = chosen if true else text
    return chosen, pieces[1:]


def _value(words: str, dot: Any) -> Any:
    """Returns the value of a pipeline, such as `.Values.port | quote` or `gt (int .Values.replicas) 1`."""
    first, *then = [each.strip() for each in words.split("|")]
    value = _call(first, dot)
    for name in then:
        value = FUNCTIONS[name](value)
    return value


def _call(words: str, dot: Any) -> Any:
    parts = re.findall(r"\([^()]*\)|\S+", words)
    if parts[0] in FUNCTIONS:
        return FUNCTIONS[parts[0]](*(_call(part.strip("()"), dot) for part in parts[1:]))
    (word,) = parts
    if word.isdigit():
        return int(word)
    assert word.startswith("."), f"unknown: {word}"
    for name in filter(None, word.split(".")):
        dot = dot[name]  # raises if the values have no such name
    return dot
