"""Logs every HTTP request when it has ended, and what went wrong; never a prompt or an answer.

A line costs nothing per token: the chunks of a stream pass the middlewares by, and tokens are counted when an answer
ends."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from http import HTTPStatus
from time import perf_counter
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import ConfigError
from penstock.server.errors import ANTHROPIC_OVERLOADED
from penstock.server.request_context import Outcome, RequestContext, context_of
from penstock.server.telemetry.http_responses import HttpResponses
from penstock.server.telemetry.metrics import FinishedRequest, Metrics

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORMATS = ("text", "json")
MAX_PATH = 200  # characters
PROBES = ("/health", "/metrics", "/ping")  # asked every few seconds: logged at level debug

access = logging.getLogger("penstock.access")


class LogSettings(NamedTuple):
    """Says what a server logs, and how."""

    level: str = "info"  # the least severe that is logged, one of LEVELS
    format: str = "text"  # one of FORMATS


def set_up_logging(settings: LogSettings) -> None:
    """Makes the process log to stderr, from this level on, as text or as one JSON object per line. Other libraries
    log warnings and errors only."""
    level, format = settings
    if level not in LEVELS:
        raise ConfigError(f"unknown log level {level!r}: use one of {', '.join(LEVELS)}")
    if format not in FORMATS:
        raise ConfigError(f"unknown log format {format!r}: use one of {', '.join(FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=max(LEVELS[level], logging.WARNING), force=True)
    logging.getLogger("penstock").setLevel(LEVELS[level])


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Returns the fields that a record carries beside its message."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


class TextFormatter(logging.Formatter):
    """Writes a record as a line of text: when, how severe, what, and its fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {_one_line(record.getMessage())}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object in one line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **fields_of(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _one_line(text: str) -> str:
    """Returns the text without control characters, with which a client could forge other lines."""
    return "".join(char if char.isprintable() else "?" for char in text)


class AccessLog:
    """Counts and logs each HTTP request of an application: method, path, status, seconds, tokens, request id and the
    name of its API key. Requests that fail on our side are logged as errors, those that are refused for load as
    warnings."""

    def __init__(self, app: ASGIApp, metrics: Metrics, responses: HttpResponses) -> None:
        self._app = app
        self._responses = responses
        metrics.listeners.append(_count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began = perf_counter()
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            context = context_of(scope)
            self._responses.count(scope, status, context.outcome.error)
            _log(scope, context, status, perf_counter() - began)


def _count(context: RequestContext, finished: FinishedRequest) -> None:
    """Adds an answer that has ended to the outcome of its HTTP request."""
    outcome, prompt = context.outcome, finished.request.prompt
    outcome.prompts[hash(prompt)] = len(prompt)
    outcome.generated += finished.generated
    outcome.finish_reason = finished.reason


def _log(scope: Scope, context: RequestContext, status: int, seconds: float) -> None:
    outcome = context.outcome
    level = _level(scope["path"], status, outcome)
    if not access.isEnabledFor(level):
        return
    fields: dict[str, Any] = {"status": status, "seconds": round(seconds, 4), "id": context.id}
    if outcome.finish_reason:
        fields |= {"prompt_tokens": sum(outcome.prompts.values()), "generated_tokens": outcome.generated}
        fields["finish"] = outcome.finish_reason
    if context.payer is not None:
        fields["key"] = context.payer.name
    if outcome.error:
        fields["error"] = outcome.error
    access.log(level, "%s %s", scope["method"], _one_line(scope["path"])[:MAX_PATH], extra={"fields": fields})


def _level(path: str, status: int, outcome: Outcome) -> int:
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, ANTHROPIC_OVERLOADED):
        return logging.WARNING
    if not status or status >= HTTPStatus.INTERNAL_SERVER_ERROR or outcome.finish_reason == "error":
        return logging.ERROR
    return logging.DEBUG if path in PROBES else logging.INFO
