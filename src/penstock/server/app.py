"""The application: routes, errors, request ids, and the engine's life around them."""

from __future__ import annotations

import asyncio
import gc
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import penstock.text.template  # noqa: F401  Jinja now, not when the first chat waits for it
from penstock.errors import ConfigError, PenstockError
from penstock.ipc.client import EngineClient
from penstock.server.access.guard import Rules, check, guarded
from penstock.server.access.protocol import BoundedProtocol
from penstock.server.batch.archive import SPACE, Archive, Space
from penstock.server.batch.run import BatchRunner
from penstock.server.errors import answer_bug, answer_error, answer_http_error, answer_left
from penstock.server.openai.batches import Batches
from penstock.server.openai.files import Files
from penstock.server.openapi import DocumentedRoute, Operation
from penstock.server.request_context import begin_notes
from penstock.server.responses.endpoints import Responses
from penstock.server.routes import Endpoint, all_routes
from penstock.server.served_model import InFlight, ServedModel
from penstock.server.telemetry.metrics import Metrics
from penstock.text import Text

if TYPE_CHECKING:
    from penstock.server.telemetry.tracing import Traces

DRAIN = 30  # seconds that answers under way have when the server is asked to stop

ANSWERED = Operation()


class Setup(NamedTuple):
    """How a model is served, beside the engine that computes it."""

    path: Path | None = None  # of the model's files, for clients that ask what it is
    space: Space = SPACE  # for files and batches
    rules: Rules = Rules()
    traces: Traces | None = None


PLAIN = Setup()


def create_app(
    client: EngineClient,
    text: Text,
    name: str,
    setup: Setup = PLAIN,
) -> ASGIApp:
    """Serves `client`'s engine as `name`; starts the client when it starts and closes it when it ends."""
    path, space, rules, traces = setup
    served = ServedModel(
        client, text, name, int(time.time()), Metrics(client, name), path, InFlight(rules.max_waiting), rules.lenient
    )
    archive = Archive(space, name)
    runner = BatchRunner(archive, served)
    files, batches = Files(archive), Batches(archive, runner)
    responses = Responses()

    def route(path: str, endpoint: Endpoint, method: str, operation: Operation = ANSWERED) -> DocumentedRoute:
        async def call(request: Request) -> Response:
            begin_notes(request, lenient=served.lenient)
            return await endpoint(request.scope.get("served", served), request)

        return DocumentedRoute(path, call, method, operation)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await client.start()
        try:
            async with runner.running(ContextMiddleware(app)):
                yield
        finally:
            await responses.close()
            await client.close()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    app = Starlette(
        routes=all_routes(route, files, batches, responses),
        exception_handlers={
            PenstockError: answer_error,
            HTTPException: answer_http_error,
            ClientDisconnect: answer_left,
            Exception: answer_bug,
        },
        lifespan=lifespan,
    )
    inner: ASGIApp = app if traces is None else traces.around(app, served.metrics, name)
    return ContextMiddleware(guarded(inner, served, rules))


def serve(
    client: EngineClient,
    load_text: Callable[[], Text],
    name: str,
    host: str,
    port: int,
    setup: Setup = PLAIN,
) -> None:
    """Serves until interrupted. The port is taken first and the engine started next, so that what is wrong with
    either is said at once; the vocabulary is read meanwhile. Answers under way are finished before the engine is
    closed."""
    with suppress(KeyboardInterrupt):
        listener = bind(host, port)
        check(setup.rules, listener.getsockname()[0])
        _run(_serve(client, load_text, name, listener, setup))


def _run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _serve(
    client: EngineClient,
    load_text: Callable[[], Text],
    name: str,
    listener: socket.socket,
    setup: Setup,
) -> None:
    loading = asyncio.create_task(asyncio.to_thread(load_text))
    hello = await client.start()
    try:
        text = await loading
    except BaseException:
        await client.close()
        raise
    gc.collect()
    gc.freeze()  # the vocabulary and all code stay: looking through them again took a sixteenth of a stream's time
    listener.listen()  # whoever reads the line below may connect at once
    app = create_app(client, text, name, setup)
    config = uvicorn.Config(
        app, http=BoundedProtocol, ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=DRAIN
    )
    host, port = listener.getsockname()[:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(f"serving {name} on http://{where} (engine process {hello.pid})", file=sys.stderr, flush=True)
    try:
        await uvicorn.Server(config).serve([listener])
    finally:
        await client.close()  # an impatient second interrupt skips the application's own ending


def bind(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise ConfigError(f"a port is from 0 to {2**16 - 1}; got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return listener


class ContextMiddleware:
    """Gives every answer an x-request-id; Anthropic's clients look for it as request-id. It is around everything else,
    so it can name the server's own `send`, without what others put before it: they care for an answer's beginning, and
    each costs a stream a microsecond a token."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        id = scope["request_id"] = f"req-{secrets.token_hex(12)}"
        scope["plain_send"] = send

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", id.encode()), (b"request-id", id.encode())]
            await send(message)

        await self._app(scope, receive, send_named)
