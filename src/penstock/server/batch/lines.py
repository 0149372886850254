"""Reads and writes the files of a batch: JSON lines, each with an id that its client chose."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import read_json
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import MAX_BODY, read_object, unsupported

MAX_LINES = 50_000
MAX_LINE = MAX_BODY + 2**16  # bytes: a body and the fields around it
MAX_ID = 512  # characters
MAX_MESSAGE = 1000  # characters of an error: a line may be one long name
BOM = "\ufeff".encode()  # some editors begin a file with it
NOT_IN_BATCHES = ("stream", "background")  # fields of a body that ask for something else than one answer


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class LineBody(msgspec.Struct):
    body: msgspec.Raw


class InputLine(NamedTuple):
    """Describes a line of the input: its place, and the output line if it cannot be run."""

    number: int
    start: int
    size: int
    custom_id: str | None
    fault: bytes | None = None


class OutputLine(msgspec.Struct):
    """Is a line of the output or error file."""

    id: str
    custom_id: str | None
    response: Any = None
    error: Any = None


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


def entries(path: Path, endpoint: str, *, lenient: bool = True) -> Iterator[InputLine]:
    """Yields every line that is not blank. A line that is wrong has a fault; the others are not affected."""
    seen: dict[str, int] = {}
    with path.open("rb") as file:
        for number, start, text in _lines(file):
            id, fault = _check(RequestContext(lenient=lenient), text, endpoint, seen, number)
            yield InputLine(number, start, len(text), id, None if fault is None else encode_fault(id, fault, number))


def body_of(path: Path, start: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return bytes(msgspec.json.decode(file.read(size), type=LineBody).body)


def encode_answer(custom_id: str | None, status: int, request_id: str, body: bytes) -> bytes:
    flat = msgspec.Raw(msgspec.json.format(body, indent=-1))
    return msgspec.json.encode(OutputLine(_new_id(), custom_id, response=LineResponse(status, request_id, flat)))


def encode_fault(custom_id: str | None, error: InvalidRequest, line: int) -> bytes:
    fault = LineError(error.code, error.message[:MAX_MESSAGE], error.param and error.param[:MAX_MESSAGE], line)
    return msgspec.json.encode(OutputLine(_new_id(), custom_id, error=fault))


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yields number, offset and text of each line. Of a line that is too long only the beginning is kept."""
    number = 0
    start = len(BOM) if file.read(len(BOM)) == BOM else 0
    file.seek(start)
    while text := file.readline(MAX_LINE + 1):
        number += 1
        rest = text
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE)):
            pass
        if text.strip():
            yield number, start, text
        start = file.tell()


def _check(
    context: RequestContext, text: bytes, endpoint: str, seen: dict[str, int], number: int
) -> tuple[str | None, InvalidRequest | None]:
    """Returns the line's custom_id, if it can be read, and the line's error."""
    id = None
    try:
        given = _object(text, number)
        id = _id(given)
        line = read_object(context, given, BatchLine, {})
        _check_line(line, endpoint)
        first = seen.setdefault(line.custom_id, number)
        if first != number:
            raise InvalidRequest(
                f"custom_id {line.custom_id!r} is also that of line {first}: give each line its own",
                param="custom_id",
                code="duplicate_custom_id",
            )
    except InvalidRequest as error:
        return id, error
    return id, None


def _object(text: bytes, number: int) -> dict[str, Any]:
    if len(text) > MAX_LINE:
        raise InvalidRequest(
            f"line {number} has more than {MAX_LINE} bytes (the limit): shorten it", code="request_too_large"
        )
    given = read_json(text, f"line {number}", code="invalid_json_line")
    if not isinstance(given, dict):
        raise InvalidRequest(f"line {number} must be a JSON object", code="invalid_json_line")
    return given


def _id(given: dict[str, Any]) -> str | None:
    id = given.get("custom_id")
    return id if isinstance(id, str) and len(id) <= MAX_ID else None


def _check_line(line: BatchLine, endpoint: str) -> None:
    if not 0 < len(line.custom_id) <= MAX_ID:
        raise InvalidRequest(
            f"custom_id must have from 1 to {MAX_ID} characters; got {len(line.custom_id)}",
            param="custom_id",
            code="invalid_custom_id",
        )
    if line.method != "POST":
        raise InvalidRequest(f"method must be POST; got {line.method[:100]!r}", param="method", code="invalid_method")
    if line.url != endpoint:
        raise InvalidRequest(
            f"url must be the batch's endpoint, {endpoint!r}; got {line.url[:100]!r}", param="url", code="invalid_url"
        )
    for name in NOT_IN_BATCHES:
        if line.body.get(name):
            raise unsupported(f"body.{name}", line.body[name])
