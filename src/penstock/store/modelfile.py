"""Reads Ollama's Modelfiles, which derive a model from another: FROM, ADAPTER, TEMPLATE, SYSTEM, PARAMETER, MESSAGE and
LICENSE.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError

INSTRUCTIONS = ("FROM", "ADAPTER", "TEMPLATE", "SYSTEM", "PARAMETER", "MESSAGE", "LICENSE", "REQUIRES")
ROLES = ("system", "user", "assistant")
QUOTES = '"""'
MANY = ("stop",)  # parameters that may be repeated


@dataclass(slots=True)
class Modelfile:
    """Holds a Modelfile's contents."""

    base: str = ""  # FROM
    adapters: list[str] = field(default_factory=list)
    template: str = ""
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    license: list[str] = field(default_factory=list)


def read_modelfile(text: str) -> Modelfile:
    """Parses a Modelfile; raises ConfigError with the invalid line."""
    made = Modelfile()
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        number, line = at + 1, lines[at].strip()
        at += 1
        if not line or line.startswith("#"):
            continue
        word, _, value = line.partition(" ")
        value = value.strip()
        while value.count(QUOTES) % 2:
            if at == len(lines):
                raise _wrong(number, f"{QUOTES} has no end")
            value += f"\n{lines[at]}"
            at += 1
        _take(made, word.upper(), _unquoted(value), number)
    if not made.base:
        raise ConfigError("a Modelfile needs a line FROM with a model's name or file")
    return made


def _take(made: Modelfile, word: str, value: str, number: int) -> None:
    if word not in INSTRUCTIONS:
        raise _wrong(number, f"{word} is not an instruction; use one of {', '.join(INSTRUCTIONS)}")
    if not value:
        raise _wrong(number, f"{word} is empty")
    match word:
        case "FROM":
            made.base = value
        case "ADAPTER":
            made.adapters.append(value)
        case "TEMPLATE":
            made.template = value
        case "SYSTEM":
            made.system = value
        case "LICENSE":
            made.license.append(value)
        case "MESSAGE":
            made.messages.append(_message(value, number))
        case "PARAMETER":
            _set(made.parameters, value, number)


def _message(value: str, number: int) -> dict[str, Any]:
    role, _, content = value.partition(" ")
    if role not in ROLES or not content:
        raise _wrong(number, f"MESSAGE is written with a role ({', '.join(ROLES)}) and a text")
    return {"role": role, "content": _unquoted(content.strip())}


def _set(parameters: dict[str, Any], value: str, number: int) -> None:
    name, _, given = value.partition(" ")
    if not given:
        raise _wrong(number, f"PARAMETER {name} has no value")
    read = _value(_unquoted(given.strip()))
    if name in MANY:
        parameters.setdefault(name, []).append(str(read))
    else:
        parameters[name] = read


def _value(text: str) -> Any:
    if re.fullmatch(r"-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false", text):
        return json.loads(text)
    return text


def _unquoted(text: str) -> str:
    for quote in (QUOTES, '"'):
        if len(text) >= 2 * len(quote) and text.startswith(quote) and text.endswith(quote):
            return text[len(quote) : -len(quote)]
    return text


def _wrong(number: int, what: str) -> ConfigError:
    return ConfigError(f"line {number} of the Modelfile: {what}")
