"""Speaks HTTP/1.1 to other engines and passes their answers on as bytes.

A general client costs several times what the relay itself does for each chunk, and it would be one more dependency:
the parser is the one that the server uses.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from penstock.errors import ConfigError

CONNECT_SECONDS = 5.0
MOST_BUFFERED = 2**20  # bytes that wait for a slow client before the engine is made to wait
TICKS = 8  # in the seconds that an engine may be silent: so precisely are they kept
TRICKLE = 64  # bytes: an answer that brings fewer during a probe is silent
MOST_READ = 64 * 2**20  # bytes of an answer that is read whole
IDLE_CONNECTIONS = 32  # idle connections kept
RECEIVED = "received"  # bytes

GiveUp = Callable[[str], None]  # ends an answer for a reason


class EngineLost(Exception):
    """Reports that an answer did not come or broke off: the engine refused or closed the connection, or is silent."""


class EngineUrl(NamedTuple):
    """Names where an engine listens."""

    host: str
    port: int
    secure: bool
    path: str  # in front of the paths of its API; empty, or begins with a slash

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.secure}://{host}:{self.port}{self.path}"


def parse_url(text: str) -> EngineUrl:
    """Returns the address in a URL, with or without /v1 at its end; raises ConfigError if there is none."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{text!r} is no URL of an engine: {error}; write http://host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise ConfigError(f"{text!r} is no URL of an engine: write http://host:port")
    secure = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return EngineUrl(parts.hostname, port or (443 if secure else 80), secure, path)


class _Connection(asyncio.Protocol):
    """Reads one answer after another from a connection. Chunks wait in a queue until they are asked for."""

    def __init__(self, traffic: Counter[str]) -> None:
        self._traffic = traffic
        self.alive = True
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = self.keep = False
        self.received = 0  # bytes, of all answers
        self.began = 0  # bytes of earlier answers
        self.failure = ""  # why the client gave the present answer up
        self._transport: asyncio.Transport | None = None
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._paused = False
        self._reader: asyncio.Future[None] | None = None  # who waits for news
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport  # uvloop's is no subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self._traffic[RECEIVED] += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def connection_lost(self, _: Exception | None) -> None:
        self.alive = False
        if self.status and not (self.complete or {"transfer-encoding", "content-length"} & self.headers.keys()):
            self.complete = True  # such an answer ends with its connection
        self.wake()

    # -- called by the parser ---------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.keep = self._parser.should_keep_alive()
        self.wake()

    def on_body(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self._size > MOST_BUFFERED and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self.wake()

    def on_message_complete(self) -> None:
        if self.status < 200:  # an interim answer: the real one follows
            self.status, self.headers = 0, {}
            return
        self.complete = True
        self.wake()

    # -- called by the client ---------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        self.status, self.headers, self.complete = 0, {}, False
        self._chunks.clear()
        self._size = 0
        self.began = self.received
        self._parser = httptools.HttpResponseParser(self)
        if self._transport is not None:
            self._transport.write(data)

    async def head(self) -> None:
        while not self.status:
            if not self.alive:
                raise EngineLost(self.failure or "the engine closed the connection before it answered")
            await self.news()

    def take(self) -> bytes | None:
        """Returns all that has come since the last call: nothing at the end of the answer, None if it is to be waited
        for. Raises EngineLost if the answer has broken off."""
        if not self._chunks:
            if self.complete:
                return b""
            if not self.alive:
                raise EngineLost(self.failure or "the engine closed the connection in the middle of its answer")
            return None
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._size = 0
        return data

    async def news(self) -> None:
        """Waits until anything has changed, or `wake` is called."""
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def wake(self) -> None:
        """Ends the waiting. A future costs a third of an asyncio.Event."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def fail(self, reason: str) -> None:
        """Gives up the present answer. Bytes that have arrived can still be taken."""
        self.failure = reason
        self.close()

    def close(self) -> None:
        self.alive = False
        if self._transport is not None:
            self._transport.abort()
        self.wake()


class _Ticking:
    """Calls something again and again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, call: Callable[[], None]) -> None:
        self._loop, self._seconds, self._call = loop, seconds, call
        self._timer = loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._seconds, self._tick)
        self._call()

    def stop(self) -> None:
        self._timer.cancel()


class EngineAnswer:
    """Is an answer whose headers have come. It must be read to its end or closed."""

    def __init__(self, connection: _Connection, release: Callable[[_Connection], None]) -> None:
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers
        self._connection = connection
        self._release = release

    async def chunks(self, silence: float) -> AsyncGenerator[bytes, None]:
        """Yields the body as it comes. Raises EngineLost if it breaks off, if nothing comes for `silence` seconds, or
        if it is given up."""
        connection, since = self._connection, 0.0
        loop = asyncio.get_running_loop()
        # a timeout for each chunk would cost a third of its relay
        ticking = _Ticking(loop, silence / TICKS, connection.wake)
        try:
            while (data := connection.take()) != b"":
                if data is not None:
                    since = 0.0
                    yield data
                    continue
                silent = loop.time() - since if since else 0.0
                if silent >= silence:
                    raise EngineLost(f"the engine has sent nothing for {silent:.3g} s")
                since = since or loop.time()
                await connection.news()
        finally:
            ticking.stop()
            self.close()

    async def read(self, silence: float) -> bytes:
        body = bytearray()
        async for chunk in self.chunks(silence):
            body += chunk
            if len(body) > MOST_READ:
                raise EngineLost(f"the engine's answer has more than {MOST_READ} bytes")
        return bytes(body)

    def close(self) -> None:
        """Gives the connection back if the answer was read to its end, and closes it otherwise, which makes the engine
        stop."""
        self._release(self._connection)


class EngineHttp:
    """Sends requests to one engine, over connections that stay open."""

    def __init__(self, url: EngineUrl, key: str = "") -> None:
        self.url = url
        self.traffic = Counter[str]()  # counts over all connections
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._tls = ssl.create_default_context() if url.secure else None
        host = str(url).partition("://")[2].partition("/")[0]
        lines = [f"host: {host}", "content-type: application/json", "accept-encoding: identity"]
        lines += [f"authorization: Bearer {key}"] if key else []
        self._lines = "".join(f"{line}\r\n" for line in lines)

    @property
    def connected(self) -> bool:
        return any(connection.alive for connection in self._idle)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        seconds: float | None = None,
        headers: str = "",
        sent: Callable[[GiveUp], None] = lambda _: None,
    ) -> EngineAnswer:
        """Returns the answer once its headers have come, within `seconds`. `headers` are whole lines. Calls `sent` with
        a function that gives the answer up. Raises EngineLost if there is none. A connection that the engine closed
        while it was idle is replaced."""
        head = f"{method} {self.url.path}{path} HTTP/1.1\r\n{self._lines}{headers}content-length: {len(body)}\r\n\r\n"
        data = head.encode("latin-1") + body
        try:
            async with asyncio.timeout(seconds):
                return await self._exchange(data, sent)
        except TimeoutError:
            raise EngineLost(f"the engine at {self.url} has not answered for {seconds:g} s") from None

    async def _exchange(self, data: bytes, sent: Callable[[GiveUp], None]) -> EngineAnswer:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                try:
                    return await self._answer(connection, data, sent)
                except EngineLost:
                    if connection.failure:
                        raise
                    continue  # it was closed while it was idle: nothing of an answer has come
        return await self._answer(await self._connect(), data, sent)

    async def _answer(self, connection: _Connection, data: bytes, sent: Callable[[GiveUp], None]) -> EngineAnswer:
        self._busy.add(connection)
        sent(connection.fail)
        connection.send(data)
        try:
            await connection.head()
        except BaseException:
            self._busy.discard(connection)
            connection.close()
            raise
        return EngineAnswer(connection, self._release)

    def _release(self, connection: _Connection) -> None:
        if connection not in self._busy:
            return
        self._busy.discard(connection)
        if connection.complete and connection.keep and connection.alive and len(self._idle) < IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()

    def received(self) -> dict[_Connection, int]:
        return {connection: connection.received for connection in self._busy}

    def give_up_silent(self, before: Mapping[_Connection, int], reason: str) -> None:
        """Gives up the answers that have brought next to nothing since `before`, or since their request: reading them
        raises EngineLost."""
        for connection in self._busy:
            if connection.received - max(before.get(connection, 0), connection.began) < TRICKLE:
                connection.fail(reason)

    async def _connect(self) -> _Connection:
        loop, url = asyncio.get_running_loop(), self.url
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self.traffic), url.host, url.port, ssl=self._tls
                )
        except TimeoutError:
            raise EngineLost(f"the engine at {url} accepts no connection within {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise EngineLost(f"the engine at {url} cannot be reached: {error.strerror or error}") from None
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
