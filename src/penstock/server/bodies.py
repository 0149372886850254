"""Bodies of requests as structs, in every dialect: a field is read, or dropped because its value asks for nothing, or
refused by name; unless the server is lenient, and then the answer says which were ignored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import read_json
from penstock.server.request_context import notes

MAX_BODY = 16 * 2**20  # bytes
PATIENCE = 4  # times that, and no more, is read
IGNORABLE = ("", "options")  # where settings stand: what is said in a chat is never left out

ANY_VALUE = object()  # in a NoEffect table: every value is accepted
NoEffect = dict[str, Any]  # field -> ANY_VALUE, or the values that ask for nothing; null always asks for nothing

S = TypeVar("S", bound=msgspec.Struct)


async def read_body(http: HttpRequest, kind: type[S], no_effect: NoEffect) -> S:
    return read_object(_json_object(await _body(http)), kind, no_effect)


def read_object(
    given: dict[str, Any], kind: type[S], no_effect: NoEffect, where: str = "", *, strict: bool = True
) -> S:
    """The object as a struct; `where` it stood in the body is part of what a refusal says. Not `strict`: numbers may
    be spelled as text, as in a query."""
    _drop_without_effect(given, no_effect, where)
    if notes().lenient:
        for name in [name for name in given if name not in kind.__struct_encode_fields__]:
            del given[name]
            notes().ignore(_path(where, name))
    while True:
        try:
            return msgspec.convert(given, kind, str_keys=True, strict=strict)
        except msgspec.ValidationError as error:
            refusal = _refusal(str(error), where)
            if not (notes().lenient and refusal.code == "unknown_parameter" and _drop_nested(given, refusal, where)):
                raise refusal from error


def _drop_nested(given: dict[str, Any], refusal: InvalidRequest, where: str) -> bool:
    """Ignores an unknown field of an object within; False where the way to it leads through a list."""
    assert refusal.param is not None
    *way, name = refusal.param.removeprefix(f"{where}.").split(".")
    holder: Any = given
    for step in way:
        holder = holder.get(step) if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or name not in holder:
        return False
    del holder[name]
    notes().ignore(refusal.param)
    return True


async def _body(http: HttpRequest) -> bytes:
    """What is too long is not kept, but read on for a while, so that a client that means well reads the refusal."""
    body = bytearray()
    size = 0
    async for chunk in http.stream():
        size += len(chunk)
        if size <= MAX_BODY:
            body += chunk
        elif size > PATIENCE * MAX_BODY:
            break
    if size > MAX_BODY:
        raise InvalidRequest(f"the body has {size} bytes; at most {MAX_BODY} are taken", code="request_too_large")
    return bytes(body)


def _json_object(body: bytes) -> dict[str, Any]:
    given = read_json(body, "the body")
    if not isinstance(given, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_type")
    return given


def _drop_without_effect(given: dict[str, Any], no_effect: NoEffect, where: str) -> None:
    for name in given.keys() & no_effect.keys():
        value, accepted = given.pop(name), no_effect[name]
        if value is None or accepted is ANY_VALUE or _among(value, accepted):
            continue
        if not (notes().lenient and where in IGNORABLE):
            raise unsupported(_path(where, name), value)
        notes().ignore(_path(where, name))


def _among(value: object, accepted: Sequence[Any]) -> bool:
    """As JSON sees it: to Python, false is among the zeros."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted)


def unsupported(param: str, value: object) -> InvalidRequest:
    text = msgspec.json.encode(value).decode()
    shown = text if len(text) <= 100 else f"{text[:100]}..."
    return InvalidRequest(
        f"{param} is not supported with this value: {shown}; leave it out", param=param, code="unsupported_parameter"
    )


_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<where>.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"^Object (?P<trouble>contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)


def _refusal(told: str, within: str) -> InvalidRequest:
    """msgspec's words as ours, with the field they are about."""
    place = _PLACE.match(told)
    assert place is not None
    where = _path(within, place["where"] or "")
    named = _NAMED.match(place["what"])
    if named is None:
        return InvalidRequest(f"{where}: {place['what'].replace('`', '')}", param=where, code="invalid_type")
    param = _path(where, named["name"])
    if named["trouble"] == "contains unknown":
        return InvalidRequest(f"unknown field {param!r}: remove it", param=param, code="unknown_parameter")
    return InvalidRequest(f"the field {param!r} is missing", param=param, code="missing_required_parameter")


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where and name else where or name
