"""Logs every HTTP request when it has ended, and what went wrong; never an answer, and a prompt only if asked to.

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
from penstock.server.context.notes import Outcome
from penstock.server.context.request_context import RequestContext, context_of
from penstock.server.http.errors import OVERLOADED
from penstock.server.telemetry.http_responses import HttpResponses
from penstock.server.telemetry.metrics import FinishedRequest, Metrics
from penstock.system.printing import escaped, escaped_json

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORMATS = ("text", "json")
MAX_PATH = 200  # characters
MAX_BODY = 16_384  # characters of a request that are logged, if prompts are
MAX_REASON = 300  # characters of an error's message
PROBES = ("/health", "/metrics", "/ping", "/engine")  # asked every few seconds: logged at level debug

access = logging.getLogger("penstock.access")


class LogSettings(NamedTuple):
    """Configures the log of a server."""

    level: str = "info"  # the least severe that is logged, one of LEVELS
    format: str = "text"  # one of FORMATS
    prompts: bool = False  # bodies of requests are logged, and so are prompts


def set_up_logging(settings: LogSettings) -> None:
    """Makes the process log to stderr, from this level on, as text or as one JSON object per line. Other libraries
    log warnings and errors only."""
    level, format, _ = settings
    if level not in LEVELS:
        raise ConfigError(f"unknown log level {level!r}: use one of {', '.join(LEVELS)}")
    if format not in FORMATS:
        raise ConfigError(f"unknown log format {format!r}: use one of {', '.join(FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=max(LEVELS[level], logging.WARNING), force=True)
    logging.getLogger("penstock").setLevel(LEVELS[level])


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def detail_of(record: logging.LogRecord) -> str:
    """Returns the lines that belong to a record, such as the stacks of a process that has died."""
    return str(getattr(record, "detail", "")).rstrip()


class TextFormatter(logging.Formatter):
    """Writes a record as a line of text: when, how severe, what, and its fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_value(value)}" for name, value in fields_of(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {_one_line(record.getMessage())}{fields}"
        details = [self.formatException(record.exc_info)] if record.exc_info else []
        return escaped("\n".join([line, *details, *([detail_of(record)] if detail_of(record) else [])]))


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object in one line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **fields_of(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if detail := detail_of(record):
            line["detail"] = detail
        return escaped_json(json.dumps(line, ensure_ascii=False, default=str))


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _one_line(text: str) -> str:
    """Returns the text without control characters, with which a client could forge other lines."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _value(value: Any) -> str:
    """Returns a field's value as it stands in a line of text: in quotes, if it is more than a word."""
    text = str(value)
    return text if text.isprintable() and not {" ", '"'} & set(text) else json.dumps(text, ensure_ascii=False)


class AccessLog:
    """Counts and logs each HTTP request of an application: method, path, status, seconds, tokens, request id, model and
    the name of its API key. Requests that fail on our side are logged as errors, those that are refused for load as
    warnings. With `prompts`, the body of a request is logged too."""

    def __init__(self, app: ASGIApp, metrics: Metrics, responses: HttpResponses, *, prompts: bool = False) -> None:
        self._app = app
        self._responses = responses
        self._prompts = prompts
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
            context, ended = context_of(scope), perf_counter()
            self._responses.count(scope, status, context.notes.outcome.error)
            level = _level(scope["path"], status, context.notes.outcome)
            if access.isEnabledFor(level):
                fields = _fields(context, status, began, ended)
                if (
                    level >= logging.WARNING and context.notes.outcome.reason
                ):  # below WARNING the reason may quote the client
                    fields["reason"] = _one_line(context.notes.outcome.reason)[:MAX_REASON]
                if self._prompts and context.body:
                    fields["body"] = context.body.decode(errors="replace")[:MAX_BODY]
                path = _one_line(scope["path"])[:MAX_PATH]
                access.log(level, "%s %s", scope["method"], path, extra={"fields": fields})


def _count(context: RequestContext, finished: FinishedRequest) -> None:
    """Adds an answer that has ended to the outcome of its HTTP request. Choices share a prompt, which counts once."""
    outcome, prompt, report = context.notes.outcome, finished.request.prompt, finished.report
    if hash(prompt) not in outcome.prompts:
        outcome.cached += min(finished.cached, len(prompt))
        for tier, tokens in report.reused if report is not None else ():
            outcome.reused[tier] = outcome.reused.get(tier, 0) + tokens
    outcome.prompts[hash(prompt)] = len(prompt)
    outcome.generated += finished.generated
    outcome.finish_reason = finished.reason
    outcome.first = min(outcome.first or finished.first, finished.first or outcome.first)
    if report is not None:
        outcome.queued = max(outcome.queued, report.queued + sum(seconds for _, seconds in report.waited))
        outcome.preemptions += report.preemptions
        outcome.loop = outcome.loop or report.loop


def _fields(context: RequestContext, status: int, began: float, ended: float) -> dict[str, Any]:
    outcome, fields = context.notes.outcome, dict[str, Any]()
    fields |= {"status": status, "seconds": round(ended - began, 4), "id": context.id}
    fields |= {"model": context.notes.model} if context.notes.model else {}
    if outcome.finish_reason:
        fields |= {"prompt_tokens": sum(outcome.prompts.values()), "cached_tokens": outcome.cached}
        fields |= {"generated_tokens": outcome.generated, "finish": outcome.finish_reason}
        fields["queue_seconds"] = round(outcome.queued, 4)
        fields |= {"ttft_seconds": round(outcome.first - began, 4)} if outcome.first else {}
    further = {
        "reused_from": ",".join(f"{tier}:{tokens}" for tier, tokens in outcome.reused.items()),
        "loading_seconds": round(context.service.loading_seconds, 4),
        "preemptions": outcome.preemptions,
        "loop_tokens": outcome.loop,
        "key": context.caller.owner_name,
        "engine": ",".join(dict.fromkeys(placement.replica for _, placement in context.notes.placements)),
        "error": outcome.error,
    }
    return fields | {name: value for name, value in further.items() if value}


def _level(path: str, status: int, outcome: Outcome) -> int:
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS, OVERLOADED):
        return logging.WARNING
    if not status or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return logging.ERROR
    if outcome.finish_reason == "error" and status < HTTPStatus.BAD_REQUEST:  # after the stream had begun
        return logging.ERROR
    return logging.DEBUG if path in PROBES else logging.INFO
