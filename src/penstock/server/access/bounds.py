"""Limits the contents of bodies, in every dialect."""

from __future__ import annotations

from collections.abc import Sized
from itertools import accumulate
from typing import Any

import msgspec

from penstock.errors import InvalidRequest

MAX_DEPTH = 128  # nesting of JSON: deeper values could overflow the stack of a template or a grammar's compiler
MAX_CONTAINERS = 2**17  # arrays and objects of one JSON text
MAX_STRINGS = 2**19  # strings of one, names of fields included: a bias may name every token of a vocabulary
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # in one message
MAX_STOPS = 32
MAX_STOP = 1024  # characters of one stop string; text is held back while one may have begun


def read_json(text: bytes | str, what: str, param: str | None = None, code: str = "invalid_json") -> Any:
    """Returns the value of a JSON text; `what` names the text in errors."""
    encoded = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if excess := _excess(encoded):
        raise InvalidRequest(f"{what} {excess}", param=param, code=code)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}", param=param, code=code) from error


def _excess(text: bytes) -> str:
    """Returns the limit that a JSON text exceeds; empty: none. The text is not parsed for that: a value takes up to
    thirty times its bytes, and all others wait meanwhile."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH and text.count(b'"') <= MAX_STRINGS:
        return ""  # which holds for almost all
    unescaped = text.replace(rb"\\", b"").replace(rb"\"", b"")
    if unescaped.count(b'"') > 2 * MAX_STRINGS:
        return f"has more than {MAX_STRINGS} strings (the limit): send fewer"
    outside = b"".join(unescaped.split(b'"')[::2])
    if outside.count(b"[") + outside.count(b"{") > MAX_CONTAINERS:
        return f"has more than {MAX_CONTAINERS} arrays and objects (the limit): send fewer"
    steps = (1 if bracket in b"[{" else -1 for bracket in outside.translate(None, NO_BRACKETS))
    if max(accumulate(steps), default=0) > MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} deep (the limit): flatten it"
    return ""


def check_count(given: Sized, most: int, param: str) -> None:
    if len(given) > most:
        raise InvalidRequest(f"{param} takes at most {most}; got {len(given)}: send fewer", param=param)


def check_stops(stops: tuple[str, ...], param: str) -> tuple[str, ...]:
    check_count(stops, MAX_STOPS, param)
    if (longest := max(map(len, stops), default=0)) > MAX_STOP:
        raise InvalidRequest(
            f"{param}: a stop string has at most {MAX_STOP} characters; got {longest}: shorten it", param=param
        )
    return stops
