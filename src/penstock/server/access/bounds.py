"""Limits what a body may contain, in every dialect."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import msgspec

from penstock.errors import InvalidRequest

MAX_DEPTH = 128  # of JSON: deeper values could overflow the stack of a template or a grammar's compiler
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of one message's content
MAX_STOPS = 32
MAX_STOP = 1024  # characters of one stop string: so many are held back while it may have begun


def read_json(text: bytes | str, what: str, param: str | None = None, code: str = "invalid_json") -> Any:
    """Returns the value of a JSON text; `what` names the text in errors."""
    try:
        value = msgspec.json.decode(text)
        deep = _may_be_deep(text) and _depth(value) > MAX_DEPTH
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}", param=param, code=code) from error
    except RecursionError:
        deep = True
    if deep:
        raise InvalidRequest(
            f"{what} is nested more than {MAX_DEPTH} deep (the limit): flatten it", param=param, code=code
        )
    return value


def _may_be_deep(text: bytes | str) -> bool:
    """Returns False for almost all texts at little cost: nothing is nested deeper than there are brackets."""
    if isinstance(text, str):
        return text.count("[") + text.count("{") > MAX_DEPTH
    return text.count(b"[") + text.count(b"{") > MAX_DEPTH


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


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
