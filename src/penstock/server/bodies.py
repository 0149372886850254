"""Reads request bodies into structs, for every dialect.

Each field is read, or dropped because its value has no effect, or refused by name. A lenient server ignores unknown
fields instead and lists them in the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import read_json
from penstock.server.request_context import RequestContext

MAX_BODY = 16 * 2**20  # bytes
READ_ON = 4 * MAX_BODY  # bytes of a body that is too large, before its connection is given up
IGNORABLE = ("", "options")  # objects whose fields may be ignored: nothing in a conversation ever is

ANY_VALUE = object()  # in a NoEffect table: every value is accepted
NoEffect = dict[str, Any]  # field -> ANY_VALUE, or the values that are accepted without effect; null always is

S = TypeVar("S", bound=msgspec.Struct)


async def read_body(http: HttpRequest, context: RequestContext, kind: type[S], no_effect: NoEffect) -> S:
    return read_object(context, _json_object(await _body(http)), kind, no_effect)


def read_object(
    context: RequestContext,
    given: dict[str, Any],
    kind: type[S],
    no_effect: NoEffect,
    where: str = "",
    *,
    strict: bool = True,
) -> S:
    """Returns the object as a struct. `where` is its place in the body, which errors name. Unless `strict`, numbers may
    be spelled as text, as in a query."""
    _drop_without_effect(context, given, no_effect, where)
    if context.lenient:
        for name in [name for name in given if name not in kind.__struct_encode_fields__]:
            del given[name]
            context.ignore(_path(where, name))
    while True:
        try:
            return msgspec.convert(given, kind, str_keys=True, strict=strict)
        except msgspec.ValidationError as error:
            refusal = _refusal(str(error), where)
            unknown = context.lenient and refusal.code == "unknown_parameter" and refusal.param is not None
            if not (unknown and _drop_nested(given, str(refusal.param), where)):
                raise refusal from error
            context.ignore(str(refusal.param))


def _drop_nested(given: dict[str, Any], param: str, where: str) -> bool:
    """Removes an unknown field of a nested object; returns False if the path to it leads through a list."""
    *path, name = param.removeprefix(f"{where}.").split(".")
    holder: Any = given
    for step in path:
        holder = holder.get(step) if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or name not in holder:
        return False
    del holder[name]
    return True


async def _body(http: HttpRequest) -> bytes:
    """Returns the body. One that is too long is not kept, but read on for a while, so that the client reads the
    refusal."""
    body = bytearray()
    size = 0
    async for chunk in http.stream():
        size += len(chunk)
        if size <= MAX_BODY:
            body += chunk
        elif size > READ_ON:
            break
    if size > MAX_BODY:
        raise InvalidRequest(f"the body has {size} bytes; the limit is {MAX_BODY}: send less", code="request_too_large")
    return bytes(body)


def _json_object(body: bytes) -> dict[str, Any]:
    given = read_json(body, "the body")
    if not isinstance(given, dict):
        raise InvalidRequest(f"the body must be a JSON object; got {type(given).__name__}", code="invalid_type")
    return given


def _drop_without_effect(context: RequestContext, given: dict[str, Any], no_effect: NoEffect, where: str) -> None:
    for name in given.keys() & no_effect.keys():
        value, accepted = given.pop(name), no_effect[name]
        if value is None or accepted is ANY_VALUE or _among(value, accepted):
            continue
        if not (context.lenient and where in IGNORABLE):
            raise unsupported(_path(where, name), value)
        context.ignore(_path(where, name))


def _among(value: object, accepted: Sequence[Any]) -> bool:
    """Compares as JSON does: Python takes false for 0."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted)


def unsupported(param: str, value: object) -> InvalidRequest:
    text = msgspec.json.encode(value).decode()
    shown = text if len(text) <= 100 else f"{text[:100]}..."
    return InvalidRequest(
        f"{param} is not supported with this value: {shown}; leave it out", param=param, code="unsupported_parameter"
    )


_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<where>.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"^Object (?P<problem>contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)


def _refusal(message: str, within: str) -> InvalidRequest:
    """Returns msgspec's error as ours, with the field that it is about."""
    place = _PLACE.match(message)
    assert place is not None
    where = _path(within, place["where"] or "")
    named = _NAMED.match(place["what"])
    if named is None:
        return InvalidRequest(f"{where}: {place['what'].replace('`', '')}", param=where, code="invalid_type")
    param = _path(where, named["name"])
    if named["problem"] == "contains unknown":
        return InvalidRequest(f"unknown field {param!r}: remove it", param=param, code="unknown_parameter")
    return InvalidRequest(f"the field {param!r} is missing", param=param, code="missing_required_parameter")


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where and name else where or name
