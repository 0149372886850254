"""The application: routes, errors, request ids, and the engine's life around them."""

from __future__ import annotations

import asyncio
import gc
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import penstock.text.template  # noqa: F401  Jinja now, not when the first chat waits for it
from penstock.errors import ConfigError, PenstockError
from penstock.ipc.client import EngineClient
from penstock.server.anthropic import COUNT_TOKENS, MESSAGES, count_tokens, messages
from penstock.server.archive import SPACE, Archive, Space
from penstock.server.batch_run import BatchRunner
from penstock.server.embeddings import EMBEDDINGS, embeddings
from penstock.server.errors import answer_bug, answer_error, answer_http_error, answer_left
from penstock.server.guard import Rules, check, guarded
from penstock.server.metrics import Metrics
from penstock.server.notes import begin_notes
from penstock.server.ollama import CHAT, GENERATE, chat, generate
from penstock.server.ollama_embed import EMBED, OLD_EMBED, embed, embed_old
from penstock.server.ollama_made import COPY, CREATE, UPLOAD_BLOB, copy, create, has_blob, upload
from penstock.server.ollama_models import (
    DELETE,
    NAMED,
    PULL,
    delete,
    greet,
    list_stored,
    pull,
    push,
    running,
    show,
    version,
)
from penstock.server.openai_batches import CREATE_BATCH, LIST_BATCHES, SHOW_BATCH, Batches
from penstock.server.openai_chat import CHAT_COMPLETIONS, chat_completions
from penstock.server.openai_completions import COMPLETIONS, completions
from penstock.server.openai_files import FILE_CONTENT, LIST_FILES, SHOW_FILE, UPLOAD, Files
from penstock.server.openapi import Document, Operation, Spoken
from penstock.server.protocol import BoundedProtocol
from penstock.server.responses import CANCEL, INPUT_ITEMS, INPUT_TOKENS, RESPOND, RETRIEVE, Responses
from penstock.server.served import Line, Served
from penstock.server.tokens import APPLY_TEMPLATE, DETOKENIZE, TOKENIZE, apply_template, detokenize, tokenize
from penstock.text import Text

if TYPE_CHECKING:
    from penstock.server.tracing import Traces

DRAIN = 30  # seconds that answers under way have when the server is asked to stop
OPEN_TO_ALL = Rules()

Endpoint = Callable[[Served, Request], Awaitable[Response]]
ANSWERED = Operation()
PLAIN_TEXT = Operation(answers="text/plain")
EMPTY = Operation(answers=None)


def create_app(
    client: EngineClient,
    text: Text,
    name: str,
    path: Path | None = None,
    space: Space = SPACE,
    traces: Traces | None = None,
    rules: Rules = OPEN_TO_ALL,
) -> ASGIApp:
    """Serves `client`'s engine as `name`; starts the client when it starts and closes it when it ends. `path` is where
    the model's files are, for clients that ask what it is; `space` is for files and batches."""
    served = Served(
        client, text, name, int(time.time()), Metrics(client, name), path, Line(rules.max_waiting), rules.lenient
    )
    archive = Archive(space, name)
    runner = BatchRunner(archive, served)
    files, batches = Files(archive), Batches(archive, runner)
    responses = Responses()

    def route(path: str, endpoint: Endpoint, method: str, operation: Operation = ANSWERED) -> Spoken:
        async def call(request: Request) -> Response:
            begin_notes(request, lenient=served.lenient)
            return await endpoint(request.scope.get("served", served), request)

        return Spoken(path, call, method, operation)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await client.start()
        try:
            async with runner.running(RequestIds(app)):
                yield
        finally:
            await responses.close()
            await client.close()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    app = Starlette(
        routes=[
            route("/v1/chat/completions", chat_completions, "POST", CHAT_COMPLETIONS),
            route("/v1/completions", completions, "POST", COMPLETIONS),
            route("/v1/models", list_models, "GET"),
            route("/v1/models/{id:path}", show_model, "GET"),
            route("/health", health, "GET"),
            route("/metrics", show_metrics, "GET", PLAIN_TEXT),
            route("/", greet, "GET", PLAIN_TEXT),
            route("/tokenize", tokenize, "POST", TOKENIZE),
            route("/detokenize", detokenize, "POST", DETOKENIZE),
            route("/apply-template", apply_template, "POST", APPLY_TEMPLATE),
            route("/v1/messages", messages, "POST", MESSAGES),
            route("/v1/messages/count_tokens", count_tokens, "POST", COUNT_TOKENS),
            route("/api/version", version, "GET"),
            route("/api/chat", chat, "POST", CHAT),
            route("/api/generate", generate, "POST", GENERATE),
            route("/api/tags", list_stored, "GET"),
            route("/api/ps", running, "GET"),
            route("/api/show", show, "POST", NAMED),
            route("/api/pull", pull, "POST", PULL),
            route("/api/delete", delete, "DELETE", DELETE),
            route("/api/embed", embed, "POST", EMBED),
            route("/api/embeddings", embed_old, "POST", OLD_EMBED),
            route("/api/create", create, "POST", CREATE),
            route("/api/copy", copy, "POST", COPY),
            route("/api/push", push, "POST"),
            route("/api/blobs/{digest}", has_blob, "HEAD", EMPTY),
            route("/api/blobs/{digest}", upload, "POST", UPLOAD_BLOB),
            route("/v1/responses", responses.create, "POST", RESPOND),
            route("/v1/responses/input_tokens", responses.input_tokens, "POST", INPUT_TOKENS),
            route("/v1/responses/{id}", responses.retrieve, "GET", RETRIEVE),
            route("/v1/responses/{id}", responses.delete, "DELETE"),
            route("/v1/responses/{id}/cancel", responses.cancel, "POST", CANCEL),
            route("/v1/responses/{id}/input_items", responses.input_items, "GET", INPUT_ITEMS),
            route("/v1/files", files.create, "POST", UPLOAD),
            route("/v1/files", files.list_all, "GET", LIST_FILES),
            route("/v1/files/{id}", files.show, "GET", SHOW_FILE),
            route("/v1/files/{id}", files.delete, "DELETE"),
            route("/v1/files/{id}/content", files.content, "GET", FILE_CONTENT),
            route("/v1/batches", batches.create, "POST", CREATE_BATCH),
            route("/v1/batches", batches.list_all, "GET", LIST_BATCHES),
            route("/v1/batches/{id}", batches.show, "GET", SHOW_BATCH),
            route("/v1/batches/{id}/cancel", batches.cancel, "POST", SHOW_BATCH),
            route("/v1/embeddings", embeddings, "POST", EMBEDDINGS),
            route("/openapi.json", Document(), "GET"),
        ],
        exception_handlers={
            PenstockError: answer_error,
            HTTPException: answer_http_error,
            ClientDisconnect: answer_left,
            Exception: answer_bug,
        },
        lifespan=lifespan,
    )
    inner: ASGIApp = app if traces is None else traces.around(app, served.metrics, name)
    return RequestIds(guarded(inner, served, rules))


def serve(
    client: EngineClient,
    load_text: Callable[[], Text],
    name: str,
    host: str,
    port: int,
    path: Path | None = None,
    space: Space = SPACE,
    traces: Traces | None = None,
    rules: Rules = OPEN_TO_ALL,
) -> None:
    """Serves until interrupted. The port is taken first and the engine started next, so that what is wrong with
    either is said at once; the vocabulary is read meanwhile. Answers under way are finished before the engine is
    closed."""
    with suppress(KeyboardInterrupt):
        listener = bind(host, port)
        check(rules, listener.getsockname()[0])
        _run(_serve(client, load_text, name, listener, path, space, traces, rules))


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
    path: Path | None,
    space: Space,
    traces: Traces | None,
    rules: Rules,
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
    app = create_app(client, text, name, path, space, traces, rules)
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


class RequestIds:
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


# -- what is served -----------------------------------------------------------------------------------------------


async def list_models(served: Served, _: Request) -> Response:
    """One object for both SDKs that ask here: OpenAI's and Anthropic's read what they know."""
    page = {"has_more": False, "first_id": served.name, "last_id": served.name}
    return _json({"object": "list", "data": [_model(served)]} | page)


async def show_model(served: Served, request: Request) -> Response:
    served.check_model(request.path_params["id"])
    return _json(_model(served))


async def health(served: Served, _: Request) -> Response:
    hello = served.client.hello
    if hello is None:
        return _json({"status": "unavailable", "engine": None, "message": served.client.trouble}, 503)
    return _json({"status": "ok", "engine": {"pid": hello.pid, "model": served.name}})


async def show_metrics(served: Served, _: Request) -> Response:
    return Response(served.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(served: Served) -> dict[str, object]:
    openai = {"id": served.name, "object": "model", "created": served.created, "owned_by": "penstock"}
    born = datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return openai | {"type": "model", "display_name": served.name, "created_at": born, "lifecycle": "active"}


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
