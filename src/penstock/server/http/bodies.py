"""Reads request bodies into structs, for every dialect.

Each field is read, or dropped because its value has no effect, or ignored and listed in the answer. A strict server
names the fields that it would ignore and refuses the request. Content of a conversation is never ignored: unreadable
content is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import Request as HttpRequest

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import read_json
from penstock.server.context.request_context import RequestContext

MAX_BODY = 16 * 2**20  # bytes
MAX_DIGITS = 20  # in the announced length

UNKNOWN_VALUE = "invalid_value"  # the code of a setting that has other values than the one given

ANY_VALUE = object()  # in a NoEffect table: every value is accepted
NoEffect = dict[str, Any]  # field -> ANY_VALUE, or the values that are accepted without effect; null always is


class ContentValues(tuple[Any, ...]):
    """Lists the accepted values of a field that holds content, in a NoEffect table. Other values are refused, even by a
    lenient server: an answer to a conversation without them would be an answer to something else."""

    __slots__ = ()


S = TypeVar("S", bound=msgspec.Struct)


async def read_body(http: HttpRequest, context: RequestContext, kind: type[S], no_effect: NoEffect) -> S:
    given, context.json = await json_of(http, context), None  # which `read_object` changes
    return read_object(context, given, kind, no_effect)


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
    dropped: dict[str, InvalidRequest] = {}  # dropped field -> its error
    while True:
        try:
            return msgspec.convert(given, kind, str_keys=True, strict=strict)
        except msgspec.ValidationError as error:
            refusal = _refusal(str(error), where)
            param = str(refusal.param)
            if param in dropped or not (context.lenient and _drop(context, given, kind, refusal, where)):
                raise dropped.get(param, refusal) from error
            dropped[param] = refusal


def _drop(context: RequestContext, given: dict[str, Any], kind: type[S], refusal: InvalidRequest, where: str) -> bool:
    """Removes the refused fields and lists them as ignored: all unknown ones, or one with an unknown value. It
    returns False if it can remove nothing."""
    param = str(refusal.param)
    if refusal.code == "unknown_parameter":
        _drop_unknown(context, given, _type_of(kind), where)
        return True
    if refusal.code != UNKNOWN_VALUE or not _drop_setting(given, param, where):
        return False
    context.notes.ignore(param)
    return True


_type_of = cache(inspect.type_info)


def _drop_unknown(context: RequestContext, value: Any, kind: inspect.Type, where: str) -> None:
    """Removes every field that its struct does not have, at any depth, and lists it as ignored."""
    match kind:
        case inspect.Metadata():
            _drop_unknown(context, value, kind.type, where)
        case inspect.UnionType():
            for each in kind.types:
                if _may_be(value, each):
                    _drop_unknown(context, value, each, where)
        case inspect.ListType() if isinstance(value, list):
            for index, item in enumerate(value):
                _drop_unknown(context, item, kind.item_type, f"{where}[{index}]")
        case inspect.StructType() if isinstance(value, dict):
            known = {field.encode_name: field.type for field in kind.fields}
            for name in [name for name in value if name not in known and name != kind.tag_field]:
                del value[name]
                context.notes.ignore(_path(where, name))
            for name in value.keys() & known.keys():
                _drop_unknown(context, value[name], known[name], _path(where, name))


def _may_be(value: Any, kind: inspect.Type) -> bool:
    """Returns whether a value can be read as this member of a union: as a struct only if it has the struct's tag."""
    if isinstance(kind, inspect.StructType) and kind.tag_field is not None:
        return isinstance(value, dict) and value.get(kind.tag_field) == kind.tag
    return True


def _drop_setting(given: dict[str, Any], param: str, where: str) -> bool:
    """Removes the field at the path `param`; returns False if the path leads through a list or is not there."""
    *path, name = param.removeprefix(f"{where}.").split(".")
    holder: Any = given
    for step in path:
        holder = holder.get(step) if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or name not in holder:
        return False
    del holder[name]
    return True


async def body_of(http: HttpRequest, context: RequestContext) -> bytes:
    """Returns the body. It is read once, however often it is asked for."""
    if context.body is None:
        context.body = await _body(http)
    return context.body


async def json_of(http: HttpRequest, context: RequestContext) -> dict[str, Any]:
    """Returns the fields of the body. It is decoded once, for the route and for its endpoint."""
    if context.json is None:
        given = read_json(await body_of(http, context), "the body")
        if not isinstance(given, dict):
            raise InvalidRequest(f"the body must be a JSON object; got {type(given).__name__}", code="invalid_type")
        context.json = given
    return context.json


async def model_named_in(http: HttpRequest, context: RequestContext) -> str | None:
    """Returns the model that a body names; None if it names none, or cannot be read: its endpoint refuses it then."""
    await body_of(http, context)
    try:
        named = (await json_of(http, context)).get("model")
    except InvalidRequest:
        return None
    return named if isinstance(named, str) else None


async def _body(http: HttpRequest) -> bytes:
    """Returns the body. One that is too long is refused as soon as that is known; the connection discards the rest, so
    that the client can read the refusal."""
    announced = http.headers.get("content-length", "")
    _check_size(int(announced) if announced.isdecimal() and len(announced) < MAX_DIGITS else 0, "")
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        _check_size(len(body), "at least ")
    return bytes(body)


def _check_size(size: int, bound: str) -> None:
    if size > MAX_BODY:
        raise InvalidRequest(
            f"the body has {bound}{size} bytes; the limit is {MAX_BODY}: send less", code="request_too_large"
        )


def _drop_without_effect(context: RequestContext, given: dict[str, Any], no_effect: NoEffect, where: str) -> None:
    for name in given.keys() & no_effect.keys():
        value, accepted = given.pop(name), no_effect[name]
        if value is None or accepted is ANY_VALUE or _among(value, accepted):
            continue
        if isinstance(accepted, ContentValues):
            raise unsupported(_path(where, name), value)
        ignore_unsupported(context, _path(where, name), value)


def _among(value: object, accepted: Sequence[Any]) -> bool:
    """Compares as JSON does: Python takes false for 0."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted)


def ignore_unsupported(context: RequestContext, param: str, value: object) -> None:
    """Lists a setting as ignored because its value is not supported; raises if the server is strict."""
    if not context.lenient:
        raise unsupported(param, value)
    context.notes.ignore(param)


def leave_out(context: RequestContext, where: str, kind: object) -> None:
    """Lists an entry of a list as ignored because its kind is not supported; raises if the server is strict."""
    if not context.lenient or not isinstance(kind, str):
        raise unsupported(f"{where}.type", kind)
    context.notes.ignore_kind(where, kind)


def unsupported(param: str, value: object) -> InvalidRequest:
    text = msgspec.json.encode(value).decode()
    shown = text if len(text) <= 100 else f"{text[:100]}..."
    return InvalidRequest(
        f"{param} is not supported with this value: {shown}; leave it out", param=param, code="unsupported_parameter"
    )


_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<where>.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"^Object (?P<problem>contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)


def _refusal(message: str, within: str) -> InvalidRequest:
    place = _PLACE.match(message)
    assert place is not None
    where = _path(within, place["where"] or "")
    named = _NAMED.match(place["what"])
    if named is None:
        code = UNKNOWN_VALUE if place["what"].startswith("Invalid enum value") else "invalid_type"
        return InvalidRequest(f"{where}: {place['what'].replace('`', '')}", param=where, code=code)
    param = _path(where, named["name"])
    if named["problem"] == "contains unknown":
        return InvalidRequest(f"unknown field {param!r}: remove it", param=param, code="unknown_parameter")
    return InvalidRequest(f"the field {param!r} is missing", param=param, code="missing_required_parameter")


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where and name else where or name
