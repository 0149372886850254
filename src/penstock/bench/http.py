"""Just enough of an HTTP/1.1 client to time server-sent events.

Written by hand because none of our dependencies has a client that is always there, and because a load generator that
shares its machine with the engine must cost little: this one takes some 15 µs an event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

from penstock.errors import ConfigError, EngineUnavailable

LINE = 1 << 20  # longest line and header taken


class Connection:
    """One connection for one exchange: `async with`, then `ask` once."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = split_url(url)
        self._api_key = api_key

    async def __aenter__(self) -> Self:
        url = self._url
        secure = url.scheme == "https"
        try:
            self._reader, self._writer = await asyncio.open_connection(
                url.hostname, url.port or (443 if secure else 80), ssl=secure or None, limit=LINE
            )
        except OSError as error:
            raise EngineUnavailable(f"no server answers at {url.geturl()}: {error.strerror or error}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._writer.close()

    async def ask(self, method: str, body: Any = None) -> Answer:
        try:
            self._writer.write(self._request(method, body))
            await self._writer.drain()
            head = await self._reader.readuntil(b"\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise EngineUnavailable(f"the server at {self._url.netloc} hung up: {error}") from error
        return _parse_head(head, self._reader)

    def _request(self, method: str, body: Any) -> bytes:
        url = self._url
        content = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{method} {url.path or '/'} HTTP/1.1",
            f"host: {url.netloc}",
            "connection: close",
            "content-type: application/json",
            f"content-length: {len(content)}",
        ]
        if self._api_key:
            head.append(f"authorization: Bearer {self._api_key}")
        return "\r\n".join([*head, "", ""]).encode() + content


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    chunked: bool
    reader: asyncio.StreamReader

    async def json(self) -> Any:
        content = b"".join([chunk async for chunk in self._chunks()])
        try:
            return json.loads(content)
        except ValueError:
            return {"error": {"message": content[:200].decode(errors="replace")}}

    async def events(self) -> AsyncIterator[Any]:
        """The JSON of each `data:` line, up to [DONE]; an answer without that did not end well."""
        rest = b""
        async for chunk in self._chunks():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    return
                if data:
                    yield json.loads(data)
        raise EngineUnavailable("the answer broke off")

    async def _chunks(self) -> AsyncIterator[bytes]:
        """What has come, whenever something has."""
        body = Chunked()
        try:
            while data := await self.reader.read(1 << 16):
                yield body.take(data) if self.chunked else data
                if body.ended:
                    return
        except (OSError, ValueError) as error:
            raise EngineUnavailable(f"the answer broke off: {type(error).__name__}: {error}") from error
        if self.chunked:
            raise EngineUnavailable("the answer broke off")


class Chunked:
    """Takes the sizes of chunks out of what comes, however that is cut."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""

    def take(self, data: bytes) -> bytes:
        """The content of the chunks that are complete now."""
        data = self._rest + data
        found, at = [], 0
        while (line := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:line].partition(b";")[0], 16)
            end = line + 2 + size
            if len(data) < end + 2:
                break
            self.ended = size == 0
            found.append(data[line + 2 : end])
            at = end + 2
        self._rest = data[at:]
        return b"".join(found)


def split_url(text: str) -> SplitResult:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{text!r} is not a URL such as http://127.0.0.1:8000/v1")
    return url


def _parse_head(head: bytes, reader: asyncio.StreamReader) -> Answer:
    status, *headers = head.decode("latin-1").split("\r\n")
    chunked = any(line.lower().replace(" ", "") == "transfer-encoding:chunked" for line in headers)
    return Answer(int(status.split(" ")[1]), chunked, reader)
