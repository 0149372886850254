"""OpenTelemetry: a span for every request that generates, with the attributes of the GenAI conventions. Imported only
where it is asked for: it needs penstock[otel]."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from threading import Thread
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock import __version__
from penstock.errors import ConfigError
from penstock.server.telemetry.metrics import FinishedRequest, Metrics

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
LAST = 2.0  # seconds that the last spans have when the server ends
PARENT = ("traceparent", "tracestate")


def traces_to(url: str) -> Traces:
    """To the collector at a URL such as http://127.0.0.1:4318; the OTEL_ environment variables apply."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"traces go to a URL such as http://127.0.0.1:4318; got {url!r}")
    resource = Resource.create({"service.version": __version__})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "penstock"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    endpoint = url if url.endswith("/v1/traces") else f"{url.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Traces(provider)


class RequestSpan:
    """A request over HTTP, and the streams of the engine that were its answer."""

    def __init__(self, span: Span, operation: str) -> None:
        self.span = span
        self.operation = operation
        self.ended: list[FinishedRequest] = []


_ANSWERING: ContextVar[RequestSpan | None] = ContextVar("answering", default=None)


class Traces:
    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("penstock", __version__)
        self._parents = TraceContextTextMapPropagator()
        self._model = ""

    def around(self, app: ASGIApp, metrics: Metrics, model: str) -> ASGIApp:
        self._model = model
        metrics.listeners.append(self._hear)

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            operation = OPERATIONS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
            if operation is None:
                await app(scope, receive, send)
            else:
                await self._trace(app, operation, scope, receive, send)

        return traced

    def close(self) -> None:
        """Sends the last spans, unless that takes too long: a collector may be gone."""
        ending = Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(LAST)

    async def _trace(self, app: ASGIApp, operation: str, scope: Scope, receive: Receive, send: Send) -> None:
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = self._parents.extract({name: given[name] for name in PARENT if name in given})
        answering = RequestSpan(self._begin(operation, SpanKind.SERVER, parent), operation)
        span = answering.span
        span.set_attributes({"http.request.method": "POST", "url.path": scope["path"]})
        span.set_attribute("penstock.request_id", scope["request_id"])

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                note_status(span, message["status"])
            await send(message)

        _ANSWERING.set(answering)
        try:
            await app(scope, receive, send_noting)
        finally:
            note_answer(span, answering.ended)
            span.end()

    def _hear(self, ended: FinishedRequest) -> None:
        """What goes on after its request was answered has a span of its own."""
        answering = _ANSWERING.get()
        if answering is not None and answering.span.is_recording():
            answering.ended.append(ended)
            return
        parent = None if answering is None else set_span_in_context(answering.span)
        ago = time.perf_counter() - ended.began
        operation = "chat" if answering is None else answering.operation
        span = self._begin(operation, SpanKind.INTERNAL, parent, time.time_ns() - int(ago * 1e9))
        note_answer(span, [ended])
        span.end()

    def _begin(self, operation: str, kind: SpanKind, parent: Context | None, began: int | None = None) -> Span:
        span = self._tracer.start_span(f"{operation} {self._model}", parent, kind, start_time=began)
        span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.provider.name": "penstock"})
        span.set_attributes({"gen_ai.request.model": self._model, "gen_ai.response.model": self._model})
        return span


def note_status(span: Span, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 400:
        span.set_attribute("error.type", str(status))
    if status >= 500:
        span.set_status(StatusCode.ERROR)


def note_answer(span: Span, ended: Sequence[FinishedRequest]) -> None:
    """Of all choices together: a prompt that they share counts once."""
    if not ended:
        return
    span.set_attributes({name: value for name, value in _asked(ended).items() if value is not None})
    span.set_attributes({name: value for name, value in _answered(ended).items() if value is not None})
    if any(each.reason == "error" for each in ended):
        span.set_attribute("error.type", "engine")
        span.set_status(StatusCode.ERROR)


def _asked(ended: Sequence[FinishedRequest]) -> dict[str, Any]:
    sampling = ended[0].request.sampling
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": sampling.stop or None,
        "gen_ai.request.choice.count": len(ended) if len(ended) > 1 else None,
    }


def _answered(ended: Sequence[FinishedRequest]) -> dict[str, Any]:
    prompts = {each.request.prompt: each.cached for each in reversed(ended)}
    began, firsts = min(each.began for each in ended), [each.first for each in ended if each.first]
    reports = [each.report for each in ended if each.report]
    return {
        "gen_ai.response.finish_reasons": [each.reason for each in ended],
        "gen_ai.usage.input_tokens": sum(map(len, prompts)),
        "gen_ai.usage.cache_read.input_tokens": sum(prompts.values()),
        "gen_ai.usage.output_tokens": sum(each.generated for each in ended),
        "gen_ai.response.time_to_first_chunk": min(firsts) - began if firsts else None,
        "gen_ai.latency.time_in_queue": max((each.queued for each in reports), default=None),
        "gen_ai.latency.time_in_model_prefill": max((each.prefill for each in reports), default=None),
        "gen_ai.latency.time_in_model_decode": max((each.decode for each in reports), default=None),
        "penstock.preemptions": sum(each.preemptions for each in reports) or None,
    }
