"""Builds and runs the application: routes, error handling, middlewares, and the engine that lives as long as they
do."""

from __future__ import annotations

import asyncio
import gc
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
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

import penstock.text.template  # noqa: F401  loads Jinja now, so that the first chat does not wait for it
from penstock.errors import ConfigError, PenstockError
from penstock.ipc.client import EngineClient
from penstock.keys import Keyring
from penstock.server.access.accounts import Accounts
from penstock.server.access.guard import Rules, check, guarded
from penstock.server.access.protocol import IDLE_SECONDS, BoundedProtocol
from penstock.server.batch.archive import SPACE, Archive, Space
from penstock.server.batch.run import BatchRunner
from penstock.server.errors import on_bug, on_client_left, on_error, on_http_error
from penstock.server.openai.batches import Batches
from penstock.server.openai.files import Files
from penstock.server.request_context import ContextMiddleware
from penstock.server.responses.endpoints import Responses
from penstock.server.routes import all_routes
from penstock.server.served_model import CLIENTS_NAMES, ServedModel
from penstock.server.telemetry.access_log import AccessLog, LogSettings, set_up_logging
from penstock.server.telemetry.compat_metrics import DEFAULT_SETS
from penstock.server.telemetry.metrics import Metrics
from penstock.text import Text

if TYPE_CHECKING:
    from penstock.server.telemetry.tracing import Traces

DRAIN_SECONDS = 30  # that answers in flight have when the server is asked to stop


class Setup(NamedTuple):
    """Says how a model is served, beside the engine that computes it."""

    path: Path | None = None  # of the model's files, for clients that ask what it is
    space: Space = SPACE  # for files and batches
    rules: Rules = Rules()
    traces: Traces | None = None
    metric_sets: tuple[str, ...] = DEFAULT_SETS  # other engines whose metric names are exported
    log: LogSettings = LogSettings()


DEFAULT_SETUP = Setup()


def create_app(
    client: EngineClient,
    text: Text,
    name: str,
    setup: Setup = DEFAULT_SETUP,
) -> ASGIApp:
    """Returns an application that serves `client`'s engine as `name`. It starts the client when it starts and closes it
    when it ends."""
    path, space, rules, traces, metric_sets, _ = setup
    aliases = (*rules.aliases, *(CLIENTS_NAMES if rules.lenient else ()))
    metrics = Metrics(client, name, metric_sets)
    served = ServedModel(client, text, name, int(time.time()), metrics, path, aliases, rules.trust_templates)
    accounts = None if rules.keys is None else Accounts(Keyring(rules.keys))
    archive = Archive(space, name)
    runner = BatchRunner(archive, served, accounts, lenient=rules.lenient)
    files, batches = Files(archive), Batches(archive, runner)
    responses = Responses()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await client.start()
        try:
            async with runner.running(app):
                yield
        finally:
            await responses.close()
            await client.close()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    app = Starlette(
        routes=all_routes(served, files, batches, responses),
        exception_handlers={
            PenstockError: on_error,
            HTTPException: on_http_error,
            ClientDisconnect: on_client_left,
            Exception: on_bug,
        },
        lifespan=lifespan,
    )
    inner: ASGIApp = app if traces is None else traces.around(app, served.metrics, name)
    logged = AccessLog(guarded(inner, served, rules, accounts), served.metrics)
    return ContextMiddleware(logged, lenient=rules.lenient)


def serve(
    client: EngineClient,
    load_text: Callable[[], Text],
    name: str,
    host: str,
    port: int,
    setup: Setup = DEFAULT_SETUP,
) -> None:
    """Serves until interrupted. It binds the port first and starts the engine next, so that an error of either is
    reported at once; the tokenizer is loaded meanwhile. Answers in flight are finished before the engine is closed."""
    set_up_logging(setup.log)
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
    gc.freeze()  # the tokenizer and all code stay: scanning them again took a sixteenth of a stream's time
    listener.listen()  # a client may connect as soon as it has read the line below
    app = create_app(client, text, name, setup)
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=int(IDLE_SECONDS),
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(f"serving {name} on http://{address} (engine process {hello.pid})", file=sys.stderr, flush=True)
    try:
        await uvicorn.Server(config).serve([listener])
    finally:
        await client.close()  # a second interrupt skips the application's own ending


def bind(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise ConfigError(f"the port must be from 0 to {2**16 - 1}; got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error
    return listener
