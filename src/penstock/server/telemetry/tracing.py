"""Exports an OpenTelemetry span for every request that generates, with the attributes of the GenAI conventions. This
module is imported only if traces are exported: it needs penstock[otel]."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Thread
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock import __version__
from penstock.errors import ConfigError
from penstock.ipc.placement import RELAYED, RequestPlacement
from penstock.server.context.request_context import RequestContext, context_of
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
EXPORT_SECONDS = 2.0  # time limit for sending the last spans at shutdown


def traces_to(url: str) -> Traces:
    """Returns an exporter to the collector at a URL such as http://127.0.0.1:4318; the OTEL_ environment variables
    apply."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"traces are exported to a URL such as http://127.0.0.1:4318; got {url!r}")
    resource = Resource.create({"service.version": __version__})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "penstock"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    endpoint = url if url.endswith("/v1/traces") else f"{url.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Traces(provider)


class RequestSpan:
    """Holds the span of an HTTP request, and the engine's requests that were its answer. Where several engines could
    compute them, these are spans below it: the wait until one has room, each decision for one, and each time that one
    has them."""

    def __init__(self, span: Span, operation: str, tracer: Tracer) -> None:
        self.span = span
        self.operation = operation
        self.finished: list[FinishedRequest] = []
        self._tracer = tracer
        self._engines: dict[int, Span] = {}  # engine's request -> span of its engine
        self._waited: set[int] = set()  # the engine's requests whose wait has a span

    def place(self, id: int, placement: RequestPlacement) -> None:
        """Begins the span of the engine that a request was sent to, and ends the span of the previous engine, which was
        lost, refused the request or is drained. The wait for room and the decision are over."""
        self._interrupt(id)
        now = time.time_ns()
        decided = now - int(placement.decided * 1e9)
        if placement.waited and id not in self._waited:
            self._waited.add(id)
            self._below("wait for room", decided - int(placement.waited * 1e9)).end(decided)
        route = self._below("route", decided)
        route.set_attributes(_route_attributes(placement))
        route.end(now)
        span = self._engines[id] = self._below(f"engine {placement.replica}", now, SpanKind.CLIENT)
        span.set_attributes({"penstock.replica": placement.replica, "penstock.resumed": placement.resumed})
        if placement.resumed:
            self.span.add_event("penstock.resume", {"penstock.replica": placement.replica})

    def _below(self, name: str, began: int, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        return self._tracer.start_span(name, set_span_in_context(self.span), kind, start_time=began)

    def fall_back(self, model: str, to: str, why: str) -> None:
        """Ends the spans of engines that could not answer, and records the fallback model."""
        for id in list(self._engines):
            self._interrupt(id)
        told = {"penstock.fallback.model": model, "penstock.fallback.to": to, "penstock.fallback.why": why}
        self.span.add_event("penstock.fallback", told)

    def _interrupt(self, id: int) -> None:
        if (span := self._engines.pop(id, None)) is not None:
            span.set_attribute("error.type", "interrupted")
            span.set_status(StatusCode.ERROR)
            span.end()

    def headers(self) -> dict[str, str]:
        """Returns the headers that make what another engine does part of the trace."""
        headers: dict[str, str] = {}
        span = self._engines.get(RELAYED, self.span)
        TraceContextTextMapPropagator().inject(headers, set_span_in_context(span))
        return headers

    def leave(self, finished: FinishedRequest) -> None:
        """Ends the span of the engine that has had a request, with the times of the engine's report."""
        if (span := self._engines.pop(finished.request.id, None)) is not None:
            set_answer(span, [finished])
            span.end()

    def end(self) -> None:
        for span in self._engines.values():
            span.end()
        set_answer(self.span, self.finished)
        self.span.end()


class Traces:
    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("penstock", __version__)
        self._parents = TraceContextTextMapPropagator()
        self._model = ""

    def around(self, app: ASGIApp, metrics: Metrics, model: str) -> ASGIApp:
        self._model = model
        metrics.listeners.append(self._record)

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            operation = OPERATIONS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
            if operation is None:
                await app(scope, receive, send)
            else:
                await self._trace(app, operation, scope, receive, send)

        return traced

    def close(self) -> None:
        """Exports the last spans. It waits EXPORT_SECONDS at most: the collector may be gone."""
        ending = Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(EXPORT_SECONDS)

    async def _trace(self, app: ASGIApp, operation: str, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        parent = self._parents.extract(context.parents)
        traced = context.span = RequestSpan(self._begin(operation, SpanKind.SERVER, parent), operation, self._tracer)
        span = traced.span
        span.set_attributes({"http.request.method": "POST", "url.path": scope["path"]})
        span.set_attribute("penstock.request_id", context.id)

        async def send_with_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                set_status(span, message["status"])
            await send(message)

        try:
            await app(scope, receive, send_with_status)
        finally:
            self._name(span, operation, context.notes.model)
            traced.end()

    def _name(self, span: Span, operation: str, model: str) -> None:
        if model and model != self._model:
            span.update_name(f"{operation} {model}")
            span.set_attributes({"gen_ai.request.model": model, "gen_ai.response.model": model})

    def _record(self, context: RequestContext, finished: FinishedRequest) -> None:
        """Adds the request to its HTTP request's span, or gives it its own if that has ended or there is none."""
        traced = context.span
        if traced is not None and traced.span.is_recording():
            traced.finished.append(finished)
            traced.leave(finished)
            return
        parent = None if traced is None else set_span_in_context(traced.span)
        ago = time.perf_counter() - finished.began
        operation = "chat" if traced is None else traced.operation
        span = self._begin(operation, SpanKind.INTERNAL, parent, time.time_ns() - int(ago * 1e9))
        set_answer(span, [finished])
        span.end()

    def _begin(self, operation: str, kind: SpanKind, parent: Context | None, began: int | None = None) -> Span:
        span = self._tracer.start_span(f"{operation} {self._model}", parent, kind, start_time=began)
        span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.provider.name": "penstock"})
        span.set_attributes({"gen_ai.request.model": self._model, "gen_ai.response.model": self._model})
        return span


def _route_attributes(placement: RequestPlacement) -> dict[str, Any]:
    names = {"source": placement.source, "computing": placement.computing}
    return {
        "penstock.replica": placement.replica,
        "penstock.route.why": placement.why,
        "penstock.route.cached_tokens": placement.cached,
        **{f"penstock.route.{part}_ms": round(ms, 3) for part, ms in placement.costs.items()},
        **{f"penstock.route.{part}": name for part, name in names.items() if name},
    }


def set_status(span: Span, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 400:
        span.set_attribute("error.type", str(status))
    if status >= 500:
        span.set_status(StatusCode.ERROR)


def set_answer(span: Span, finished: Sequence[FinishedRequest]) -> None:
    """Sets the attributes of all choices together: a prompt that they share counts once."""
    if not finished:
        return
    span.set_attributes({name: value for name, value in _request_attributes(finished).items() if value is not None})
    span.set_attributes({name: value for name, value in _answer_attributes(finished).items() if value is not None})
    if any(each.reason == "error" for each in finished):
        span.set_attribute("error.type", "engine")
        span.set_status(StatusCode.ERROR)


def _request_attributes(finished: Sequence[FinishedRequest]) -> dict[str, Any]:
    sampling = finished[0].request.sampling
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": sampling.stop or None,
        "gen_ai.request.choice.count": len(finished) if len(finished) > 1 else None,
    }


def _answer_attributes(finished: Sequence[FinishedRequest]) -> dict[str, Any]:
    prompts = {each.request.prompt: each.cached for each in reversed(finished)}
    began, firsts = min(each.began for each in finished), [each.first for each in finished if each.first]
    reports = [each.report for each in finished if each.report]
    return {
        "gen_ai.response.finish_reasons": [each.reason for each in finished],
        "gen_ai.usage.input_tokens": sum(map(len, prompts)),
        "gen_ai.usage.cache_read.input_tokens": sum(prompts.values()),
        "gen_ai.usage.output_tokens": sum(each.generated for each in finished),
        "gen_ai.response.time_to_first_chunk": min(firsts) - began if firsts else None,
        "gen_ai.latency.time_in_queue": max((each.queued for each in reports), default=None),
        "gen_ai.latency.time_in_model_prefill": max((each.prefill for each in reports), default=None),
        "gen_ai.latency.time_in_model_decode": max((each.decode for each in reports), default=None),
        "penstock.preemptions": sum(each.preemptions for each in reports) or None,
    }
