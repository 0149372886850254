"""Calls the application from inside the server: a request like a client's, without a connection."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from starlette.types import ASGIApp, Message

from penstock.server.context.request_context import RequestContext

log = logging.getLogger(__name__)


class AppAnswer(NamedTuple):
    status: int
    request_id: str
    body: bytes


async def call_app(app: ASGIApp, context: RequestContext, path: str, body: bytes) -> AppAnswer:
    to_read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not to_read:
            await asyncio.Future()  # this client does not disconnect
        return to_read.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    context.send = send
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": {"context": context},
    }
    try:
        await app(scope, receive, send)
    except Exception:
        if not sent:
            raise
        log.exception("request %s, made by the server itself, failed", context.id)  # its answer reports that, too
    finally:
        context.end()
    begun, *parts = sent
    return AppAnswer(begun["status"], context.id, b"".join(part.get("body", b"") for part in parts))
