"""Builds and runs the application: routes, error handling, middlewares, and the engine that lives as long as they
do."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, nullcontext, suppress
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

import penstock.templates.template  # noqa: F401  loads Jinja now, so that the first chat does not wait for it
from penstock.config import LOG_FORMAT, log_to_stderr
from penstock.errors import ConfigError, PenstockError
from penstock.keys import Keyring
from penstock.server.access.accounts import Accounts
from penstock.server.access.guard import Rules, check, guarded
from penstock.server.access.open_files import FullTable, raise_limit
from penstock.server.access.protocol import IDLE_SECONDS, BoundedProtocol, limit_connections
from penstock.server.access.usage import UsageRecord
from penstock.server.batch.archive import SPACE, Archive, Space
from penstock.server.batch.run import BatchRunner
from penstock.server.context.middleware import ContextMiddleware
from penstock.server.dialects import load_busiest
from penstock.server.http.errors import on_bug, on_client_left, on_error, on_http_error, on_missing_package
from penstock.server.models.pool import ModelPool
from penstock.server.routes import all_routes, error_shapes
from penstock.server.services import Services
from penstock.server.streams.kept import KeepLimits, KeptStreams
from penstock.server.telemetry.access_log import AccessLog, LogSettings, set_up_logging
from penstock.server.telemetry.http_responses import HttpResponses
from penstock.server.telemetry.recent_requests import RecentRequests

if TYPE_CHECKING:
    from penstock.server.telemetry.tracing import Traces

DRAIN_SECONDS = 30.0  # answers in flight have this long to end when the server is asked to stop
ACCEPTED_AT_ONCE = 16  # connections: much fewer than the files that are reserved
BACKLOG = 2048  # connections that wait to be accepted
COLLECT_AFTER = 10_000, 10, 10  # the usual 700 objects are a fraction of a step for 1,024 clients, which makes 5,000
CUT_SECONDS = 2.0  # time limit for sending the final error chunks at shutdown


class Setup(NamedTuple):
    """Holds the settings of the server, except engine settings."""

    data: str = ""  # name of the server's folder among all servers' folders
    space: Space = SPACE  # limits of files and batches
    rules: Rules = Rules()
    traces: Traces | None = None
    log: LogSettings = LogSettings()
    drain: float = DRAIN_SECONDS
    keep: KeepLimits = KeepLimits()  # limits of streams that can be resumed
    usage: UsageRecord | None = None  # where each key's tokens are recorded; None: nowhere


DEFAULT_SETUP = Setup()


def archive_of(pool: ModelPool, setup: Setup) -> Archive:
    return Archive(setup.space, setup.data or pool.models.default_name)


def create_app(pool: ModelPool, setup: Setup = DEFAULT_SETUP, archive: Archive | None = None) -> ASGIApp:
    """Returns an application that serves the models of the pool. It starts the pool when it starts, and closes it and
    the archive when it ends."""
    rules, traces = setup.rules, setup.traces
    streams = KeptStreams(setup.keep)
    accounts = None if rules.keys is None else Accounts(Keyring(rules.keys))
    archive = archive or archive_of(pool, setup)
    runner = BatchRunner(archive, pool, accounts, lenient=rules.lenient, terms=rules.terms)
    recent = RecentRequests()
    services = Services(archive, runner, streams, recent, keeps_answers=bool(setup.space.answers))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await pool.start()
        try:
            async with runner.running(app), nullcontext() if setup.usage is None else setup.usage.running():
                try:
                    yield
                finally:  # while the archive is open
                    await services.close()
        finally:
            await streams.close()
            await pool.close()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    pool.metrics.listeners.append(recent.add)
    routes = all_routes(pool, services)
    counted = HttpResponses(routes)
    pool.metrics.register(counted)
    pool.metrics.register(streams)
    if pool.foreign is not None:
        pool.metrics.register(pool.foreign)
    app = Starlette(
        routes=routes,
        exception_handlers={
            PenstockError: on_error,
            HTTPException: on_http_error,
            ClientDisconnect: on_client_left,
            ModuleNotFoundError: on_missing_package,
            Exception: on_bug,
        },
        lifespan=lifespan,
    )
    inner: ASGIApp = app if traces is None else traces.around(app, pool.metrics, pool.models.default_name)
    if setup.usage is not None:
        pool.metrics.listeners.append(setup.usage.add)
    inner = guarded(inner, pool, rules, accounts)
    logged = AccessLog(inner, pool.metrics, counted, prompts=setup.log.prompts)
    return ContextMiddleware(logged, streams, error_shapes().of_request, lenient=rules.lenient, terms=rules.terms)


def serve(pool: ModelPool, host: str, port: int, setup: Setup = DEFAULT_SETUP) -> None:
    """Serves until interrupted. It binds the port first and starts the pool next, so that an error of either is
    reported at once. Answers in flight are finished before the engines are closed."""
    set_up_logging(setup.log)
    os.environ[LOG_FORMAT] = setup.log.format  # engine processes read it
    # uvicorn raises a signal again after it has ended. SIGTERM would then end the process before it cleans up.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        listener = bind(host, port)
        check(setup.rules, listener.getsockname()[0])
        _run(_serve(pool, listener, setup))


def _run(main: Coroutine[Any, Any, None]) -> None:
    try:
        from uvloop import run
    except ImportError:
        run = asyncio.run
    run(main)  # out of the handler: errors of the server would have that one as their context


async def _serve(pool: ModelPool, listener: socket.socket, setup: Setup) -> None:
    archive = archive_of(pool, setup)
    if setup.space.answers:
        await archive.open()
    await asyncio.gather(pool.start(), asyncio.to_thread(load_busiest))  # while the engine starts
    gc.collect()
    limit_connections(raise_limit())
    asyncio.get_running_loop().set_exception_handler(FullTable())
    gc.freeze()  # the tokenizer and all code stay: scanning them again took a sixteenth of a stream's time
    gc.set_threshold(*COLLECT_AFTER)
    listener.listen()  # a client may connect as soon as it has read the line below
    app = create_app(pool, setup, archive)
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        timeout_keep_alive=int(IDLE_SECONDS),
        timeout_graceful_shutdown=ceil(setup.drain + CUT_SECONDS),
    )
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    log_to_stderr(f"serving {_described(pool)} on http://{address}{_processes(pool)}")
    try:
        await DrainingServer(config, pool, setup.drain).serve([listener])
    finally:
        await pool.close()  # a second interrupt skips the application's own ending


class DrainingServer(uvicorn.Server):
    """Stops when the answers in flight have ended, or after `drain` seconds: those that are left then end with an error
    in their dialect, so that their clients know that something is missing."""

    def __init__(self, config: uvicorn.Config, pool: ModelPool, drain: float) -> None:
        super().__init__(config)
        self._pool = pool
        self._drain = drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept. asyncio accepts up to `backlog` connections in a row before any of them can be refused: so
        the backlog is small at first and grows later."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        reason = f"the server is stopping, and this answer took longer than {self._drain:g} seconds: send it again"
        cutting = asyncio.get_running_loop().call_later(self._drain, self._pool.models.end_answers, reason)
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()


def _described(pool: ModelPool) -> str:
    names = [entry.name for entry in pool.models.entries]
    if pool.foreign is not None:
        names += [model.name for model in pool.foreign.models()]
        if not names:
            return "no model yet: no engine answers"
    return names[0] if len(names) == 1 else f"{len(names)} models ({', '.join(names)})"


def _processes(pool: ModelPool) -> str:
    loaded = [client for _, client in pool.models.clients() if client.hello is not None]
    if replicas := [replica for client in loaded for replica in client.replicas]:
        return f" (replicas: {', '.join(replica.name for replica in replicas)})"
    pids = [str(client.hello.pid) for client in loaded if client.hello is not None]
    if pool.foreign is not None and not pids:
        return f" ({len(pool.foreign.engines())} other engines)"
    return f" (engine process {', '.join(pids)})" if pids else "; a model is loaded when it is first asked for"


def bind(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise ConfigError(f"the port must be from 0 to {2**16 - 1}; got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        if os.name == "posix":  # on Windows it would let two servers have the same port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error
    return listener
