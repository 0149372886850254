"""Reads a form with a file in it as it arrives: keeps the fields, and passes the file on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.errors import InvalidRequest

T = TypeVar("T")

MAX_FIELDS = 8
MAX_FIELD = 1024  # bytes
MAX_HEADERS = 8
MAX_HEADER = 4096  # bytes


class Form:
    """Parses one form. `fields` are text by name; the part named `file` is not among them."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidRequest(
                f"a file must be sent as multipart/form-data with a boundary; got {content_type[:100]!r}",
                code="invalid_content_type",
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # None: no file has arrived yet
        self.ended = False
        self._parser = self._parse(lambda: self._new_parser(options[b"boundary"]))
        self._name = ""
        self._is_file = False
        self._header = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._field = bytearray()
        self._arrived: list[bytes] = []

    def push(self, data: bytes) -> bytes:
        """Takes the next bytes of the body; returns the file's bytes among them."""
        self._parse(lambda: self._parser.write(data))
        arrived, self._arrived = b"".join(self._arrived), []
        return arrived

    def finish(self) -> None:
        """Raises if the body ended before the form did, or if the form lacks a file."""
        if not self.ended:
            raise InvalidRequest("the form is incomplete: its last boundary is missing", code="invalid_form")
        if self.filename is None:
            raise InvalidRequest("the form has no part named 'file'", param="file", code="missing_required_parameter")

    def _new_parser(self, boundary: bytes) -> MultipartParser:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._take_header,
                "on_header_value": self._take_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER,
        )

    def _parse(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except FormParserError as error:
            raise InvalidRequest(f"the form is not well formed: {error}", code="invalid_form") from error

    # -- callbacks of the parser --------------------------------------------------------------------------------

    def _begin_part(self) -> None:
        self._headers = {}
        self._field.clear()

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if (self._is_file and self.filename is not None) or self._name in self.fields:
            raise InvalidRequest(
                f"the form has two parts named {self._name!r}: send one", param=self._name, code="invalid_form"
            )
        if self._is_file:
            self.filename = options.get(b"filename", b"upload").decode("utf-8", "replace")
        if len(self.fields) == MAX_FIELDS:
            raise InvalidRequest(
                f"the form has more than {MAX_FIELDS} fields (the limit): send fewer", code="invalid_form"
            )

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._arrived.append(data[start:end])
        elif len(self._field) + end - start > MAX_FIELD:
            raise InvalidRequest(
                f"the field {self._name!r} has more than {MAX_FIELD} bytes (the limit): shorten it",
                param=self._name,
                code="invalid_form",
            )
        else:
            self._field += data[start:end]

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _end(self) -> None:
        self.ended = True
